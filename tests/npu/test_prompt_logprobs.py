"""Prompt log-probabilities on the ``rebel`` device, over the SDK's double.

The head's graph computes the logits of a chunk's rows after the chunk; the vendor's plug-in fails
on these requests (`npu-0.12-parity.md`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, THREE_CHUNKS, run_lives
from tests.reference import reference_generate

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("prompt_logprobs_script.py")
POSITIONS = (1, 2, 89, 127, 128, 129, 255, 256, 299)
"""Of tokens whose values are compared: in and at the edges of chunks of 128."""


@dataclass(frozen=True)
class Life:
    checkpoint: Path
    options: dict[str, Any] = field(default_factory=dict)


def test_values_are_transformers(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    prompts = [THREE_CHUNKS, ONE_CHUNK]
    fields = [{"prompts": prompts}]
    ((long, short),), _ = run_lives(SCRIPT, [Life(checkpoint)], fields, tmp_path, None, None)
    for prompt, answer in ((THREE_CHUNKS, long), (ONE_CHUNK, short)):
        assert answer["tokens"] == reference_generate(checkpoint, prompt, 2).token_ids
        assert len(answer["scores"]) == len(prompt) - 1
        for position in (place for place in POSITIONS if place < len(prompt)):
            logprobs = reference_generate(checkpoint, prompt[:position], 1).logprobs[0]
            expected = float(logprobs[prompt[position]])
            logprob, rank = answer["scores"][position - 1]
            assert logprob == pytest.approx(expected, abs=1e-3), (len(prompt), position)
            assert rank == int((logprobs > expected).sum()) + 1
