"""The collectives of parallel ranks: torch ops that a graph contains, and exchanges between steps.

An op names its group of ranks by a string, and a stored program contains only that name. It is
resolved when a program is bound. Ranks of the emulated device use shared memory where possible,
whose native side is ``devices/emulated/kernels/channel/channel.h``: all ranks of a group open a
channel, or none does, for example where one is on another host. The RBLN SDK's compiler maps
torch's functional collectives, and resolves the name of a process group to its ranks by
``process_group_dict``. The bodies here use torch.distributed, which works between hosts and without
our kernels.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from rbln_backend.errors import CompileError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

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


_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _body, _fake = _BODIES[_name]
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _body, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)


def process_group_dict() -> dict[str, list[int]]:
    """Return the ranks of every process group of this process by its name, also of one rank."""
    from vllm.distributed.parallel_state import get_dp_group, get_pp_group, get_tp_group

    return {
        str(process_group.group_name): list(group.ranks)
        for group in (get_tp_group(), get_pp_group(), get_dp_group())
        for process_group in (group.device_group, group.cpu_group)
    }


def use_functional_ops(graph: fx.Graph, by_name: Mapping[str, Group]) -> None:
    """Replace every collective of ``graph``; raise ``KeyError`` for an unknown group.

    Operators are named without their overload, as in what Dynamo captures of ``torch.distributed``.
    The functional collectives support the first dimension alone: parts of others are moved there.
    """
    ops = torch.ops._c10d_functional

    def call(op: Any, *args: Any) -> fx.Node:
        done = graph.call_function(op, args)
        return graph.call_function(ops.wait_tensor, (done,))

    def moved(x: Any, world_size: Any, source: Any, target: Any) -> Any:
        """Return the parts of ``x`` along ``source``, concatenated along ``target``."""
        if source == target:
            return x
        parts = graph.call_function(torch.chunk, (x, world_size, source))
        return graph.call_function(torch.cat, (parts, target))

    for node in list(graph.nodes):
        name = collective_name(node.target)
        if name is None:
            continue
        x, *sizes, group = node.args
        ranks = by_name[group].process_group.group_name
        with graph.inserting_before(node):
            if name == "all_reduce":
                result = call(ops.all_reduce, x, "sum", ranks)
            elif name == "all_gather":
                dim, world_size = sizes
                rows = call(ops.all_gather_into_tensor, x, world_size, ranks)
                result = moved(rows, world_size, 0, dim)
            else:
                dim, world_size = sizes
                rows = moved(x, world_size, dim, 0)
                result = call(ops.reduce_scatter_tensor, rows, "sum", world_size, ranks)
            node.replace_all_uses_with(result)
        graph.erase_node(node)


_CHANNEL_NAMESPACE = "rbln_channels"
_CHANNEL_SCHEMAS = {
    "all_reduce": "(Tensor x, int channel) -> Tensor",
    "all_gather": "(Tensor x, int dim, int world_size, int channel) -> Tensor",
    "reduce_scatter": "(Tensor x, int dim, int world_size, int channel) -> Tensor",
}
SHARED_MEMORY = Path("/dev/shm")
# Bytes that a rank transfers at once; each rank has two such buffers. Docker's /dev/shm has 64 MiB.
SEAT_BYTES = 1 << 20


_channel_library = torch.library.Library(_CHANNEL_NAMESPACE, "DEF")
for _name, _schema in _CHANNEL_SCHEMAS.items():
    _channel_library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))


@dataclass(frozen=True, slots=True)
class _Offer:
    """Message of the first rank to the others."""

    path: str
    """Empty if the file could not be created."""
    reason: str


def open_channel(group: Group, library: ctypes.CDLL) -> int | None:
    """Open a channel to the other ranks of ``group``; every rank calls it at the same time.

    Return its number, or None and log the reason where the ranks do not share memory.
    """
    offers = [_make_file(group, library) if group.rank == 0 else None]
    dist.broadcast_object_list(offers, src=group.ranks[0], group=group.host_group)
    (offer,) = offers
    assert offer is not None
    processes = _all_objects(group, os.getpid())
    number, reason = _open(offer, group, library, processes)
    reasons = [other for other in _all_objects(group, reason) if other]
    if group.rank == 0 and offer.path:
        # All ranks have mapped it or failed. Unlinked now, it is not left behind by a crash.
        Path(offer.path).unlink(missing_ok=True)
    if not reasons:
        return number
    logger.info("Group %s uses torch.distributed: %s", group.name, reasons[0])
    return None


def _make_file(group: Group, library: ctypes.CDLL) -> _Offer:
    measure = library.rbln_emulator_channel_bytes
    measure.argtypes, measure.restype = (ctypes.c_int, ctypes.c_int64), ctypes.c_int64
    path = SHARED_MEMORY / f"rbln-{group.name}-{secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _Offer("", f"{SHARED_MEMORY}: {error.strerror}")
    try:
        # A page that cannot be allocated would raise SIGBUS later.
        os.posix_fallocate(descriptor, 0, measure(len(group.ranks), SEAT_BYTES))
    except OSError as error:
        path.unlink()
        return _Offer("", f"{SHARED_MEMORY}: {error.strerror}")
    finally:
        os.close(descriptor)
    return _Offer(str(path), "")


def _open(
    offer: _Offer, group: Group, library: ctypes.CDLL, processes: list[int]
) -> tuple[int | None, str]:
    if not offer.path:
        return None, offer.reason
    start = library.rbln_emulator_open_channel
    start.argtypes = (
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int32),
    )
    start.restype = ctypes.c_int64
    ids = (ctypes.c_int32 * len(processes))(*processes)
    number = start(offer.path.encode(), group.rank, len(processes), SEAT_BYTES, ids)
    if number < 0:
        return None, f"rank {group.rank} does not see the memory of rank 0"
    return number, ""


def _all_objects(group: Group, value: Any) -> list[Any]:
    values: list[Any] = [None] * len(group.ranks)
    dist.all_gather_object(values, value, group=group.host_group)
    return values


def use_channels(graph: fx.Graph, channels: Mapping[str, int]) -> None:
    """Replace the collectives of ``graph`` whose group has a channel; ``channels`` by group."""
    for node in graph.nodes:
        name = collective_name(node.target)
        if name in _CHANNEL_SCHEMAS and node.args[-1] in channels:
            node.target = getattr(torch.ops.rbln_channels, name).default
            node.args = (*node.args[:-1], channels[node.args[-1]])


def union_of_ranks(group: Group | None, work: Callable[[], Set[str]]) -> Set[str]:
    """Run ``work`` on every rank of ``group`` and return the union of the results; None: here.

    If it fails on one rank, the others raise ``CompileError`` with its reason: without that they
    would wait for it for ever.
    """
    if group is None:
        return work()
    failure: Exception | None = None
    mine: Set[str] = frozenset()
    try:
        mine = work()
    except Exception as error:  # noqa: BLE001 (raised again after the exchange)
        failure = error
    outcomes = _all_objects(group, (sorted(mine), None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, reason) in zip(group.ranks, outcomes, strict=True):
        if reason is not None:
            raise CompileError(f"rank {rank} failed: {reason}")
    return {name for names, _ in outcomes for name in names}


def value_of_first_rank(group: Group | None, value: int) -> int:
    """Return ``value`` of the first rank of ``group``, 0 to 255; every rank calls it.

    Raises ``RuntimeError`` when the first rank has exited.
    """
    if group is None:
        return value
    byte = torch.tensor([value], dtype=torch.uint8)
    dist.broadcast(byte, src=group.ranks[0], group=group.host_group)
    return int(byte[0])


def send_to_last_stage(tensor: Tensor) -> None:
    """Send ``tensor`` [...] to the last stage if it needs it. Called in the first stage.

    Raises ``RuntimeError`` when the last rank has exited.
    """
    group, is_needed = groups()["pp"], torch.zeros(1, dtype=torch.uint8)
    last = group.ranks[-1]
    dist.recv(is_needed, src=last, group=group.host_group)
    if is_needed[0]:
        dist.send(tensor.contiguous(), dst=last, group=group.host_group)


def receive_from_first_stage(into: Tensor | None) -> None:
    """Fill ``into`` [...] from the first stage; None if it is not needed. Called in the last one.

    Raises ``RuntimeError`` when the first rank has exited.
    """
    group = groups()["pp"]
    first, is_needed = group.ranks[0], torch.tensor([into is not None], dtype=torch.uint8)
    dist.send(is_needed, dst=first, group=group.host_group)
    if into is not None:
        dist.recv(into, src=first, group=group.host_group)


def init_process_groups(
    config: VllmConfig, rank: int, init_method: str, local_rank: int, backend: str = "gloo"
) -> None:
    """Create vLLM's process groups; those of host tensors are gloo's with any ``backend``.

    vLLM's own function is in a module that imports its GPU runner and Inductor.
    """
    from vllm.distributed.parallel_state import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    parallel = config.parallel_config
    seconds = parallel.distributed_timeout_seconds
    timeout = timedelta(seconds=seconds) if seconds is not None else None
    init_distributed_environment(
        parallel.world_size, rank, init_method, local_rank, backend, timeout
    )
    ensure_model_parallel_initialized(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
