"""The collectives that a graph may hold: torch ops that name their group of ranks by a string.

A stored program keeps the name alone. What stands behind it is found when a program is bound: the
emulated device's ranks share memory where they can (``channel``), the RBLN SDK gets the ops that
its compiler maps (``compiler.rebel_compiler``). The bodies here go through torch.distributed, which
works everywhere: between hosts, and without our kernels.
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
    # The sum over the ranks of ``group``, taken in float32 and the same bits on each of them.
    "all_reduce": "(Tensor x, str group) -> Tensor",
    # The ranks' tensors one after the other along ``dim``.
    "all_gather": "(Tensor x, int dim, int world_size, str group) -> Tensor",
    # This rank's part along ``dim`` of the sum.
    "reduce_scatter": "(Tensor x, int dim, int world_size, str group) -> Tensor",
}


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks behind a name, as this process sees them."""

    name: str
    """``tp``, ``pp``, ``dp`` or ``ep``: a rank is in one of each kind."""
    ranks: tuple[int, ...]
    """Global numbers; a rank's place is its number in the group."""
    rank: int
    """This process's place."""
    process_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    """The same ranks over gloo, for what is no tensor of the device."""


_groups: dict[str, Group] = {}


def register(group: Group) -> None:
    """Let ops that name the group find it; a later one of the same name takes its place."""
    _groups[group.name] = group


def forget(group: Group) -> None:
    """The group is destroyed."""
    if _groups.get(group.name) is group:
        del _groups[group.name]


def collective_name(target: object) -> str | None:
    """``all_reduce``, ``all_gather`` or ``reduce_scatter`` where a node's target is one of them.

    Dynamo records the op, a stored program its overload.
    """
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    names = {getattr(torch.ops.rbln_collectives, name): name for name in SCHEMAS}
    return names.get(target) if isinstance(target, torch._ops.OpOverloadPacket) else None


def groups() -> Mapping[str, Group]:
    """Every group of more than one rank that this process is in, by name."""
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
    # gloo has no such operation of its own.
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
