"""The collectives that a graph may contain: torch ops that name their group of ranks by a string.

A stored program contains only the name. It is resolved when a program is bound: ranks of the
emulated device use shared memory where possible (``channel``), the RBLN SDK gets the ops that its
compiler maps (``devices.rebel.compiler``). The bodies here use torch.distributed, which works
between hosts and without our kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAMESPACE = "rbln_collectives"
SCHEMAS = {
    # The sum over the ranks of ``group`` in float32, bit-identical on every rank.
    "all_reduce": "(Tensor x, str group) -> Tensor",
    # The ranks' tensors one after the other along ``dim``.
    "all_gather": "(Tensor x, int dim, int world_size, str group) -> Tensor",
    # This rank's part along ``dim`` of the sum.
    "reduce_scatter": "(Tensor x, int dim, int world_size, str group) -> Tensor",
}


@dataclass(frozen=True, slots=True)
class Group:
    """A named group of ranks that this process belongs to."""

    name: str
    """``tp``, ``pp``, ``dp`` or ``ep``: a rank is in one group of each kind."""
    ranks: tuple[int, ...]
    """Global ranks, in the order of their ranks within the group."""
    rank: int
    """This process's rank within the group."""
    process_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    """The same ranks over gloo, for host objects and tensors."""


_groups: dict[str, Group] = {}


def register(group: Group) -> None:
    """Register a group under its name, replacing an earlier one."""
    _groups[group.name] = group


def unregister(group: Group) -> None:
    """Remove a destroyed group."""
    if _groups.get(group.name) is group:
        del _groups[group.name]


def collective_name(target: object) -> str | None:
    """Return ``all_reduce``, ``all_gather`` or ``reduce_scatter`` for such a node target, or None.

    Dynamo records the op, a stored program its overload.
    """
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    names = {getattr(torch.ops.rbln_collectives, name): name for name in SCHEMAS}
    return names.get(target) if isinstance(target, torch._ops.OpOverloadPacket) else None


def groups() -> Mapping[str, Group]:
    """Return every group of more than one rank that this process belongs to, by name."""
    return dict(_groups)


def _gathered_shape(x: Tensor, dim: int, factor: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] *= factor
    return shape


def _all_reduce(x: Tensor, group: str) -> Tensor:
    # The sum is taken in float32 and rounded once, as the shared-memory kernel does.
    total = x.to(torch.float32, copy=True).contiguous()
    dist.all_reduce(total, group=_groups[group].process_group)
    return total.to(x.dtype)


def _all_gather(x: Tensor, dim: int, world_size: int, group: str) -> Tensor:
    flat = x.new_empty(world_size * x.numel())
    dist.all_gather_single(flat, x.contiguous().view(-1), group=_groups[group].process_group)
    parts = flat.view(world_size, *x.shape)
    return parts.movedim(0, dim % x.dim()).reshape(_gathered_shape(x, dim, world_size))


def _reduce_scatter(x: Tensor, dim: int, world_size: int, group: str) -> Tensor:
    # gloo has no reduce-scatter.
    part = _all_reduce(x, group).chunk(world_size, dim)[_groups[group].rank]
    return part.contiguous()


def _fake_all_reduce(x: Tensor, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


def _fake_all_gather(x: Tensor, dim: int, world_size: int, group: str) -> Tensor:  # noqa: ARG001
    return x.new_empty(_gathered_shape(x, dim, world_size))


def _fake_reduce_scatter(x: Tensor, dim: int, world_size: int, group: str) -> Tensor:  # noqa: ARG001
    shape = list(x.shape)
    shape[dim] //= world_size
    return x.new_empty(shape)


_BODIES: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce": (_all_reduce, _fake_all_reduce),
    "all_gather": (_all_gather, _fake_all_gather),
    "reduce_scatter": (_reduce_scatter, _fake_reduce_scatter),
}


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in SCHEMAS.items():
        body, fake = _BODIES[name]
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, body, "CPU")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


LIBRARY = _define()
