"""The ranks whose graphs meet in collectives: whatever one of them runs, all of them run."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch.distributed as dist

from rbln_backend.errors import CompileError
from rbln_backend.parallel.collectives import Group, groups


class Peers:
    """This rank and those that it shares graphs with; none for a rank that is alone."""

    def __init__(self, group: Group | None) -> None:
        self._group = group

    @classmethod
    def of_this_rank(cls) -> Peers:
        """The ranks of the same stage, among which its layers are split.

        A mixture of experts is split among those of all data-parallel engines.
        """
        return cls(groups().get("ep") or groups().get("tp"))

    def together(self, work: Callable[[], Set[str]]) -> Set[str]:
        """Do ``work`` on every rank and return what any of them returned.

        Raises on all of them where it fails on one: ``CompileError`` with its reason on the others,
        which would wait for it without end.
        """
        if self._group is None:
            return work()
        failure: Exception | None = None
        mine: Set[str] = frozenset()
        try:
            mine = work()
        except Exception as error:  # noqa: BLE001 (raised again once the others know)
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
