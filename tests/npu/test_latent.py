"""Latent attention over the double: answers are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rbln_backend.graphs.bundles import collect, write_folder
from server.commands.cache import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, SHARED, TWO_BLOCKS, Job, run
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# The sizes that the SDK's ops take.
SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 4096}
IN_BLOCKS = SIZES | {
    "q_lora_rank": 64,
    "v_head_dim": 48,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
}
DRAFTS = {"method": "suffix", "num_speculative_tokens": 3}


def test_answers_are_transformers(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    """Cold, over a bundle, and wrong without the copies."""
    job = Job(checkpoints("deepseek_v3", **SIZES), batches=[[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    cold = run([job], tmp_path)
    assert cold.answers == [job.expected()]
    ops = {name for call in cold.calls("compile") for name, _ in call["sdk_ops"]}
    phases = {f"rbln_custom_ops::paged_flash_causal_mla_naive_{x}" for x in ("prefill", "decode")}
    assert phases <= ops
    # Weights of heads are prepared once; nothing is computed of a router's bias.
    assert [call["of_weights"] for call in cold.calls("compile")] == [[]] * 5
    bundle = tmp_path / "bundle"
    write_folder(bundle, collect(tmp_path / "cache", GraphChecks()))
    elsewhere = run([job], tmp_path / "host", rbln={"cache_bundles": [str(bundle)]})
    assert elsewhere.answers == cold.answers
    broken = run([job], tmp_path, **{"break": ["kv_copy"]})
    assert broken.answers[0][0] == cold.answers[0][0]
    assert broken.answers[0][1] != cold.answers[0][1]
    for warm in (elsewhere, broken):
        assert all(call["hit"] for call in warm.calls("compile"))


def test_fp8_weights_answer_as_their_float32_copy(tmp_path: Path) -> None:
    """In blocks, as DeepSeek publishes them; the projection that is absorbed is expanded."""
    recipe = Recipe(format="fp8", block=(64, 64))
    path = make_quantized_checkpoint("deepseek_v3", tmp_path / "fp8", recipe, **IN_BLOCKS)
    job = Job(path, batches=[[ONE_CHUNK]], reference=path / "plain")
    ran = run([job], tmp_path / "npu")
    assert ran.answers == [job.expected()]
    given = {x["dtype"] for call in ran.calls("compile") for x in call["inputs"]}
    assert "float8_e4m3fn" in given


def test_drafts_lose_no_token(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    """The second time, the first answers are the drafts, and fewer steps give them."""
    path, prompts = checkpoints("deepseek_v3", **SIZES), [ONE_CHUNK, TWO_BLOCKS]
    job = Job(path, {"speculative_config": DRAFTS}, [prompts, prompts], 16, checks_all_drafts=True)
    ran = run([job], tmp_path)
    assert ran.answers == [job.expected()]
    broken = run([job], tmp_path, **{"break": ["draft_rows"]})
    assert broken.answers != ran.answers
