"""The rounds of a step, agreed between the data-parallel ranks of a mixture of experts.

Their graphs share collectives, so all ranks run graphs of equal sizes: that of the largest prefill
chunk of any rank, then that of the largest decode batch. A rank without requests of that phase runs
the graph over padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from rbln_backend.core import Phase, StepBatch, StepRound
from rbln_backend.parallel.collectives import Group, groups
from rbln_backend.vllm_compat.surface import VllmConfig

# In the order in which ranks run them.
_PHASES = (Phase.PREFILL, Phase.POOLING, Phase.DECODE)


class StepAgreement(Protocol):
    """Determines the rounds of a step."""

    ranks: int
    """Ranks whose tokens a mixture of experts computes."""

    def rounds(self, batch: StepBatch | None) -> Sequence[StepRound]:
        """Return the rounds to run now; ``batch`` is None for a rank without requests."""
        ...


class SoleRank:
    """A single rank: the batch is the only round."""

    ranks = 1

    def rounds(self, batch: StepBatch | None) -> Sequence[StepRound]:
        """As ``StepAgreement``."""
        if batch is None:
            return ()
        count = batch.num_tokens if batch.phase.takes_chunk else batch.size
        return (StepRound(batch.phase, batch.size, (count,), batch.length),)


class DataRanks:
    """The ranks of several engines, all of which call ``rounds`` once per step."""

    def __init__(self, group: Group) -> None:
        self.ranks = len(group.ranks)
        self._group = group.host_group
        self._mine = torch.zeros(2, dtype=torch.int32)
        self._all = [torch.zeros(2, dtype=torch.int32) for _ in group.ranks]

    def rounds(self, batch: StepBatch | None) -> Sequence[StepRound]:
        """As ``StepAgreement``; raises ``RuntimeError`` when a rank has exited."""
        self._mine[0] = -1 if batch is None else _PHASES.index(batch.phase)
        self._mine[1] = 0 if batch is None else batch.size
        dist.all_gather(self._all, self._mine, group=self._group)
        return agreed([(number, size) for number, size in torch.stack(self._all).tolist()])


def make_agreement(config: VllmConfig) -> StepAgreement:
    """Return the agreement of a rank; engines of a dense model need none between them."""
    if config.parallel_config.data_parallel_size == 1:
        return SoleRank()
    return DataRanks(groups()["dp"])


def agreed(wanted: Sequence[tuple[int, int]]) -> list[StepRound]:
    """Return the rounds for the ``(phase, size)`` of each rank.

    A phase is its index in the order of rounds, -1 for a rank without requests.
    """
    rounds = []
    for index, phase in enumerate(_PHASES):
        counts = tuple(size if of_rank == index else 0 for of_rank, size in wanted)
        if any(counts):
            rounds.append(StepRound(phase, max(counts), counts))
    return rounds
