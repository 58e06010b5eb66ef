"""The ranks that take part in the same collectives, and must therefore run the same graphs."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch.distributed as dist

from rbln_backend.errors import CompileError
from rbln_backend.parallel.collectives import Group, groups


class Peers:
    """This rank's group of ranks with collectives in common; None for a rank without any."""

    def __init__(self, group: Group | None) -> None:
        self._group = group

    @classmethod
    def of_this_rank(cls) -> Peers:
        """Return the ranks of the same stage; with expert parallelism those of all engines."""
        return cls(groups().get("ep") or groups().get("tp"))

    def union(self, work: Callable[[], Set[str]]) -> Set[str]:
        """Run ``work`` on every rank and return the union of the results.

        If it fails on one rank, the others raise ``CompileError`` with its reason: without that
        they would wait for it for ever.
        """
        if self._group is None:
            return work()
        failure: Exception | None = None
        mine: Set[str] = frozenset()
        try:
            mine = work()
        except Exception as error:  # noqa: BLE001 (raised again after the exchange)
            failure = error
        outcomes = self._exchange((sorted(mine), None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        for place, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise CompileError(f"rank {self._group.ranks[place]} failed: {reason}")
        return {name for names, _ in outcomes for name in names}

    def _exchange(
        self, outcome: tuple[list[str], str | None]
    ) -> list[tuple[list[str], str | None]]:
        assert self._group is not None
        outcomes: list[tuple[list[str], str | None]] = [([], None)] * len(self._group.ranks)
        dist.all_gather_object(outcomes, outcome, group=self._group.host_group)
        return outcomes
