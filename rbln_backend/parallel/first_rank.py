"""Decisions that tensor-parallel ranks take over from their first, such as those by its clock."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rbln_backend.parallel.collectives import Group, groups


class FirstRank:
    """The first rank of a group, which decides for all; None for a rank without others."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._byte = torch.zeros(1, dtype=torch.uint8)

    @classmethod
    def of_this_rank(cls) -> FirstRank:
        """Return the first of the tensor-parallel ranks of this stage."""
        return cls(groups().get("tp"))

    def decide(self, own: int) -> int:
        """Return ``own`` of the first rank, 0 to 255; every rank calls it.

        Raises ``RuntimeError`` when the first rank has exited.
        """
        if self._group is None:
            return own
        self._byte[0] = own
        dist.broadcast(self._byte, src=self._group.ranks[0], group=self._group.host_group)
        return int(self._byte[0])
