"""`RankPlace`: the position of a worker among the processes of an instance.

One instance (one HTTP process, one run directory) may have several engines (data parallel), each
with several ranks (tensor times pipeline parallel). Invariants
(tests/unit/reporting/test_ranks.py): workers of an instance have distinct numbers; exactly one rank
of an engine counts its steps, and exactly one its samples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Position of a worker.

    `engine` is the index of the data-parallel engine, as in vLLM's metrics. `rank` is the index
    within the engine, which has `ranks` ranks, `tensor_ranks` per pipeline stage. Of the ranks of
    all engines `local_ranks` are on this host; `local_number` is the index among these.
    """

    engine: int = 0
    rank: int = 0
    ranks: int = 1
    tensor_ranks: int = 1
    local_number: int = 0
    local_ranks: int = 1

    def __post_init__(self) -> None:
        if self.engine < 0 or not 0 <= self.rank < self.ranks:
            raise ValueError(f"There is no rank {self.rank} of {self.ranks} in {self.engine}")
        if self.tensor_ranks < 1 or self.ranks % self.tensor_ranks:
            raise ValueError(f"{self.ranks} ranks cannot be stages of {self.tensor_ranks}")

    @property
    def number(self) -> int:
        """Index of this worker in its instance; part of its file names."""
        return self.engine * self.ranks + self.rank

    @property
    def counts_steps(self) -> bool:
        """True for the rank that counts the steps of its engine."""
        return self.rank == 0

    @property
    def replies(self) -> bool:
        """True for the rank whose results the executor reads: the first of the last stage.

        It also counts the work of that stage after the graph.
        """
        return self.rank == self.ranks - self.tensor_ranks
