"""Predicted first tokens, from a load and step times that are given."""

from __future__ import annotations

import pytest

from rbln_backend.bucketing.chunk_plan import ChunkPlan
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.scheduler.objectives.forecast import LoadAhead, forecast
from rbln_backend.scheduler.objectives.step_clock import PREFILL

PLAN = ChunkPlan(BucketTable((32, 64)), step_tokens=8)


def seconds(phase: str, size: int) -> float:
    """A chunk takes a second a bucket of 64, a decode step 10 ms for each row."""
    return PLAN.bucket(size) / 64 if phase == PREFILL else size / 100


@pytest.mark.parametrize(
    ("own", "prompts", "answers", "first_token_s", "token_s"),
    [
        (64, [], [], 1.0, 0.01),
        (20, [], [], 0.5, 0.01),
        (128, [64], [], 3.0, 0.02),
        # Two decode steps of one row follow each chunk.
        (64, [64], [100], 2 + 4 * 0.01, 0.03),
        # All four rows are taken: one is free after 7 steps of four rows.
        (64, [], [9, 7, 50, 50], 1 + 2 * 0.04 + 7 * 0.04, 0.04),
        (64, [64], [9, 7, 50, 50], 2 + 4 * 0.04 + 9 * 0.04, 0.04),
    ],
)
def test_chunks_steps_between_them_and_the_wait_for_a_row_add_up(
    own: int, prompts: list[int], answers: list[int], first_token_s: float, token_s: float
) -> None:
    load = LoadAhead(own=own, prompts=prompts, answers=answers, rows=4, decodes_per_chunk=2)
    found = forecast(load, seconds, PLAN.next_chunk)
    assert (found.first_token_s, found.token_s) == pytest.approx((first_token_s, token_s))


def test_nothing_is_predicted_before_steps_were_measured() -> None:
    load = LoadAhead(own=64, prompts=[], answers=[], rows=4, decodes_per_chunk=2)
    found = forecast(load, lambda *_: None, PLAN.next_chunk)
    assert (found.first_token_s, found.token_s) == (None, None)
