"""Which of an instance's processes a worker is: names its files, says what it counts.

One instance (one HTTP process, one run directory) may have several engines (data parallel), each
with several ranks (tensor times pipeline parallel). Invariants
(tests/unit/reporting/test_ranks.py): no two workers of an instance have the same number; of the
ranks of an engine exactly one counts its steps, and exactly one its samples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a worker.

    `engine` is the data-parallel engine, as vLLM's own metrics number it; `rank` counts within the
    engine, which has `ranks` of them, `tensor_ranks` for each pipeline stage. Of the ranks of all
    engines, `local_ranks` are on this host, and this one is number `local_number` of them.
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
        """The number of this worker in its instance: of its files, and of its line of story."""
        return self.engine * self.ranks + self.rank

    @property
    def counts_steps(self) -> bool:
        """Whether this rank counts what all ranks of the engine do together, step by step."""
        return self.rank == 0

    @property
    def replies(self) -> bool:
        """Whether the executor waits for this rank's results: the first of the last stage.

        It also counts what that stage does after the graph; the others are never heard.
        """
        return self.rank == self.ranks - self.tensor_ranks
