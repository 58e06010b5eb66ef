"""What the data-parallel ranks of a mixture of experts run in a step, agreed before they run it.

Their graphs meet in collectives, so that all of them run graphs of the same sizes, one after the
other: the largest prefill chunk of any rank, then the largest decode batch. A rank without work of
that kind runs the graph over padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from rbln_backend.compiler.port import Phase
from rbln_backend.parallel.collectives import Group, groups
from rbln_backend.vllm_compat.surface import VllmConfig
from rbln_backend.worker.step.batches import StepWork

# In the order in which ranks run them.
_PHASES = (Phase.PREFILL, Phase.POOLING, Phase.DECODE)


class Round(NamedTuple):
    """One graph of a step."""

    phase: Phase
    size: int
    """What the bucket is chosen by: tokens of a chunk or requests, of the rank that has most."""
    counts: tuple[int, ...]
    """The same of each rank; 0 of those that only take part."""
    length: int = 1
    """Tokens of each request, in a step that checks drafts."""


class StepAgreement(Protocol):
    """Finds the rounds of a step."""

    ranks: int
    """How many ranks' tokens a mixture of experts computes."""

    def rounds(self, work: StepWork | None) -> Sequence[Round]:
        """What runs now; ``work`` is this rank's own part, None if it has none."""
        ...


class SoleRank:
    """Nobody to agree with: one round, the work itself."""

    ranks = 1

    def rounds(self, work: StepWork | None) -> Sequence[Round]:
        """As ``StepAgreement``."""
        if work is None:
            return ()
        count = work.num_tokens if work.phase.takes_chunk else work.size
        return (Round(work.phase, work.size, (count,), work.length),)


class DataRanks:
    """The ranks of several engines; every one of them asks once per step."""

    def __init__(self, group: Group) -> None:
        self.ranks = len(group.ranks)
        self._group = group.host_group
        self._mine = torch.zeros(2, dtype=torch.int32)
        self._all = [torch.zeros(2, dtype=torch.int32) for _ in group.ranks]

    def rounds(self, work: StepWork | None) -> Sequence[Round]:
        """As ``StepAgreement``; raises ``RuntimeError`` when a rank is gone."""
        self._mine[0] = -1 if work is None else _PHASES.index(work.phase)
        self._mine[1] = 0 if work is None else work.size
        dist.all_gather(self._all, self._mine, group=self._group)
        return agreed([(number, size) for number, size in torch.stack(self._all).tolist()])


def make_agreement(config: VllmConfig) -> StepAgreement:
    """Engines of a dense model are by themselves, whatever their number."""
    if config.parallel_config.data_parallel_size == 1:
        return SoleRank()
    return DataRanks(groups()["dp"])


def agreed(wanted: Sequence[tuple[int, int]]) -> list[Round]:
    """The rounds for what each rank wants: a phase's place in the order, -1: none, and a size."""
    rounds = []
    for number, phase in enumerate(_PHASES):
        counts = tuple(size if theirs == number else 0 for theirs, size in wanted)
        if any(counts):
            rounds.append(Round(phase, max(counts), counts))
    return rounds
