"""The device: finite memory, KV of its own, and one process at a time."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import IO

import torch
from rebel import log
from rebel.device_info import visible_devices
from rebel.rules import RuleBrokenError, is_on, require
from rebel.settings import SETTINGS
from torch import Tensor

# A CR13 has four chiplets; vllm_rbln's estimate reserves 256 MiB on each for the command stream of
# a graph with KV (vllm_rbln/v1/worker/utils.py, estimate_available_memory).
_CHIPLETS = 4
RUNTIME_BYTES = _CHIPLETS * (256 << 20)
# Fresh device memory holds anything: NaN in every float format. Not all of a large pool, which
# would make the host's pages real.
_GARBAGE, _GARBAGE_BYTES = 0xFF, 256 << 20


# MAP_NORESERVE of Linux, which Python's module names from 3.13 on.
_NO_RESERVE = 0x4000
# [blocks, 2, heads, 1, slots, head size], as the ``rbln_custom_ops`` read it.
_CACHE_RANK = 6


def _fresh_memory(size: int) -> Tensor:
    """Bytes that become real when they are touched: a device has more of them than this host."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    memory[:_GARBAGE_BYTES].fill_(_GARBAGE)
    return memory


def storage_id(tensor: Tensor) -> int:
    """Return an id shared by all views of one storage, on meta too."""
    return int(tensor.untyped_storage()._cdata)


class Memory:
    """Bytes of the device that are taken, and by what."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def take(self, what: str, size: int) -> None:
        """Raises RuntimeError with the SDK's words where ``size`` bytes are not left."""
        used = sum(self._taken.values())
        if is_on("memory") and used + size > SETTINGS.memory:
            log.write("out_of_memory", what=what, bytes=size, used=used, limit=SETTINGS.memory)
            raise RuntimeError(
                f"SYS_ENOMEM: Out of memory: {what} needs {size} bytes, {used} of "
                f"{SETTINGS.memory} are taken"
            )
        self._taken[what] = self._taken.get(what, 0) + size

    def give_back(self, what: str) -> None:
        log.write("freed", what=what, bytes=self._taken.pop(what))


MEMORY = Memory()


class KvMemory:
    """The device's memory behind static tensors, apart from the host's."""

    def __init__(self) -> None:
        # A static tensor is kept, so that its storage's identity stays its own.
        self._static: dict[int, tuple[str, Tensor]] = {}
        self._memory: dict[int, Tensor] = {}

    def add(self, tensor: Tensor, name: str) -> None:
        """A later name for the same storage replaces the earlier one."""
        self._static[storage_id(tensor)] = (name, tensor)

    def get_key_name(self, tensor: Tensor) -> str | None:
        """The name under which the tensor's storage was marked static."""
        found = self._static.get(storage_id(tensor))
        return found[0] if found else None

    def on_device(self, tensor: Tensor) -> Tensor:
        """The device's content of a static tensor: same shape, strides and dtype, on the CPU."""
        if not is_on("kv") and tensor.device.type == "cpu":
            return tensor.detach()
        memory = self._memory.get(storage_id(tensor))
        if memory is None:
            memory = self._memory[storage_id(tensor)] = self._allocate(tensor)
        typed = memory.view(tensor.dtype)
        return typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _allocate(self, tensor: Tensor) -> Tensor:
        name, size = self._static[storage_id(tensor)][0], tensor.untyped_storage().nbytes()
        # A head lives on one chiplet: fewer heads than chiplets are stored more than once.
        copies = max(1, _CHIPLETS // int(tensor.shape[2])) if tensor.dim() == _CACHE_RANK else 1
        MEMORY.take(f"kv {name} {id(self)}", size * copies)
        log.write("kv_memory", name=name, bytes=size, copies=copies)
        return _fresh_memory(size)


class Npus:
    """The devices that this process has open; another process cannot open them."""

    def __init__(self) -> None:
        self._locks: dict[int, IO[str]] = {}

    def open(self, count: int) -> list[int]:
        """Open the first ``count`` visible devices; raises RuntimeError where that cannot be."""
        visible = visible_devices()
        if len(visible) < count:
            raise RuntimeError(f"{count} RBLN devices are needed, {len(visible)} are visible")
        if not self._locks:
            log.write_environment("open")
        for number in visible[:count]:
            if number not in self._locks:
                self._lock(number)
        return visible[:count]

    def _lock(self, number: int) -> None:
        if SETTINGS.log is None:  # ranks of one run find each other by their log
            return
        file = SETTINGS.log.with_suffix(f".npu{number}").open("a")
        try:
            # POSIX locks belong to a process: a forked child has none.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            log.write("broken", rule="devices", message=f"NPU {number} is taken")
            if is_on("devices"):
                raise RuleBrokenError(
                    f"SDK double, rule 'devices': NPU {number} is open in another process; "
                    f"RBLN_VISIBLE_DEVICES={os.environ.get('RBLN_VISIBLE_DEVICES')!r}"
                ) from error
        self._locks[number] = file


NPUS = Npus()


def is_device_tensor(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is on ``rbln:N``, torch_rbln's device."""
    return tensor.device.type in ("rbln", "privateuseone")


def alias_of_device_tensor(tensor: Tensor) -> Tensor:
    """The memory of a tensor on ``rbln:0`` as a CPU tensor.

    ``librbln.cpp`` of ``tests/vendor`` hands out host addresses, so the pointer can be read here.
    """
    size = tensor.untyped_storage().nbytes()
    if size == 0:
        return torch.empty(tensor.size(), dtype=tensor.dtype)
    start = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
    memory = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=torch.uint8)
    return memory.view(tensor.dtype).as_strided(
        tensor.size(), tensor.stride(), tensor.storage_offset()
    )


def check_reachable(name: str, tensor: Tensor) -> None:
    """A tensor on meta has a content only if it was marked static."""
    require("static", tensor.device.type != "meta", f"input {name} is on meta and not static")
