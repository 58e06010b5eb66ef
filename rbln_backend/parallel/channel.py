"""Shared memory between the ranks of a group that run on one host.

The native side is ``devices/emulated/kernels/channel/channel.h``. All ranks of a group open a
channel, or none does: if one of them cannot map the file, for example on another host, all of them
use torch.distributed.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from rbln_backend.parallel.collectives import Group, collective_name
from rbln_backend.vllm_compat.surface import init_logger

logger = init_logger(__name__)

NAMESPACE = "rbln_channels"
SCHEMAS = {
    "all_reduce": "(Tensor x, int channel) -> Tensor",
    "all_gather": "(Tensor x, int dim, int world_size, int channel) -> Tensor",
    "reduce_scatter": "(Tensor x, int dim, int world_size, int channel) -> Tensor",
}
SHARED_MEMORY = Path("/dev/shm")
# Bytes that a rank transfers at once; each rank has two such buffers. Docker's /dev/shm has 64 MiB.
SEAT_BYTES = 1 << 20


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    return library


LIBRARY = _define()


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
    offer = _make_file(group, library) if group.rank == 0 else None
    offer = _from_first(group, offer)
    processes = _all_gather(group, os.getpid())
    number, reason = _open(offer, group, library, processes)
    reasons = [other for other in _all_gather(group, reason) if other]
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
        *(ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
        ctypes.POINTER(ctypes.c_int32),
    )
    start.restype = ctypes.c_int64
    ids = (ctypes.c_int32 * len(processes))(*processes)
    number = start(offer.path.encode(), group.rank, len(processes), SEAT_BYTES, ids)
    if number < 0:
        return None, f"rank {group.rank} does not see the memory of rank 0"
    return number, ""


def _from_first(group: Group, value: _Offer | None) -> _Offer:
    values = [value]
    dist.broadcast_object_list(values, src=group.ranks[0], group=group.host_group)
    assert values[0] is not None
    return values[0]


def _all_gather(group: Group, value: Any) -> list[Any]:
    values: list[Any] = [None] * len(group.ranks)
    dist.all_gather_object(values, value, group=group.host_group)
    return values


def use_channels(graph: fx.Graph, channels: Mapping[str, int]) -> None:
    """Replace the collectives of ``graph`` whose group has a channel; ``channels`` by group."""
    for node in graph.nodes:
        name = collective_name(node.target)
        if name in SCHEMAS and node.args[-1] in channels:
            node.target = getattr(torch.ops.rbln_channels, name).default
            node.args = (*node.args[:-1], channels[node.args[-1]])
