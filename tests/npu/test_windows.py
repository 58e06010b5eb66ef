"""Sliding windows on an NPU: prefixes of windows in pages are reused, those of shifted ones not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, TWO_BLOCKS, Job, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LONG_SHARED = TWO_BLOCKS[:1300] + ONE_CHUNK
"""Its hit of 1,280 tokens ends 256 tokens behind the first block."""


def window_job(checkpoints: CheckpointCache, window: int) -> Job:
    path = checkpoints("mistral", max_position_embeddings=4096, sliding_window=window)
    return Job(path, batches=[[TWO_BLOCKS], [LONG_SHARED]])


# The window of the hit reaches into its first block, or lies in the second alone.
@pytest.mark.parametrize("window", [300, pytest.param(200, marks=pytest.mark.wide)])
def test_prefixes_of_windows_in_pages_are_reused(
    checkpoints: CheckpointCache, tmp_path: Path, window: int
) -> None:
    job = window_job(checkpoints, window)
    cold = run([job], tmp_path)
    assert cold.answers == [job.expected()]
    assert [call["tokens"] for call in cold.calls("copy_kv")] == [256]
    broken = run([job], tmp_path, **{"break": ["kv_copy"]})
    assert all(call["hit"] for call in broken.calls("compile"))
    assert broken.answers[0][0] == job.expected()[0]
    assert broken.answers[0][1] != job.expected()[1], "the second answer needs the copy"


@pytest.mark.wide
def test_prefixes_of_shifted_windows_are_not(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    job = window_job(checkpoints, 300)
    ran = run([job], tmp_path, npu="RBLN-CR03")
    assert ran.answers == [job.expected()]
    assert ran.calls("copy_kv") == []
