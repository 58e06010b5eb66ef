"""Latent attention over the double: answers are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, SHARED, TWO_BLOCKS, Job, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# The sizes that the SDK's ops take.
SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 4096}


def test_answers_are_transformers(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    job = Job(checkpoints("deepseek_v3", **SIZES), batches=[[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    cold = run([job], tmp_path)
    assert cold.answers == [job.expected()]
    ops = {name for call in cold.calls("compile") for name, _ in call["sdk_ops"]}
    phases = {f"rbln_custom_ops::paged_flash_causal_mla_naive_{x}" for x in ("prefill", "decode")}
    assert phases <= ops
    warm = run([job], tmp_path)
    assert warm.answers == cold.answers
    assert all(call["hit"] for call in warm.calls("compile"))
    broken = run([job], tmp_path, **{"break": ["kv_copy"]})
    assert broken.answers[0][0] == cold.answers[0][0]
    assert broken.answers[0][1] != cold.answers[0][1]
