"""Data-parallel ranks find the same rounds from what each of them wants."""

from __future__ import annotations

from rbln_backend.core import Phase, StepRound
from rbln_backend.worker.ranks import agreed

PREFILL, POOLING, DECODE, IDLE = 0, 1, 2, -1


def test_decode_uses_the_size_of_the_largest_batch() -> None:
    wanted = [(DECODE, 1), (DECODE, 7), (IDLE, 0), (DECODE, 3)]
    assert agreed(wanted) == [StepRound(Phase.DECODE, 7, (1, 7, 0, 3))]


def test_chunks_come_before_batches() -> None:
    wanted = [(DECODE, 4), (PREFILL, 20), (PREFILL, 64)]
    assert agreed(wanted) == [
        StepRound(Phase.PREFILL, 64, (0, 20, 64)),
        StepRound(Phase.DECODE, 4, (4, 0, 0)),
    ]


def test_pooling_has_its_own_round() -> None:
    assert agreed([(POOLING, 9), (IDLE, 0)]) == [StepRound(Phase.POOLING, 9, (9, 0))]


def test_nothing_runs_when_all_are_idle() -> None:
    assert agreed([(IDLE, 0), (IDLE, 0)]) == []


def test_every_phase_of_a_step_has_a_place_in_the_order() -> None:
    phases = [agreed([(number, 1)])[0].phase for number in (PREFILL, POOLING, DECODE)]
    assert phases == [Phase.PREFILL, Phase.POOLING, Phase.DECODE]
