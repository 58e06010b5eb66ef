"""Where KV caches and large tensors live: huge pages, mappings that one step keeps for the next.

Torch's allocator maps a buffer of more than 32 MiB anew at every step, on small pages (in its
wheels for x86-64; those for aarch64 allocate by mimalloc, which keeps what was freed);
``kernels/bindings/memory.cpp`` is the allocator that does not. It comes with the native kernels'
library; without them everything here leaves memory as it is.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rbln_backend.core import HeadCopy, WindowRestore, WindowStore
from rbln_backend.devices.emulated.kernel_set import native_library
from rbln_backend.errors import DeviceMemoryError

# More than the float32 logits of 256 rows over a vocabulary of 128k, and what sorting them takes.
_KEPT_BYTES = 1 << 30
_SYSTEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ROLLUP = Path("/proc/self/smaps_rollup")
# MADV_POPULATE_WRITE of linux/mman.h, which Python's mmap does not name.
_POPULATE_WRITE = 23
_NOT_NATIVE = "needs the native kernels"


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """Chosen memory mode, and the reason if it is not the default."""

    allocator: Literal["mapped", "system"]
    allocator_reason: str
    huge_pages: Literal["advised", "off"]
    huge_pages_reason: str


def choose_memory(*, mapped: bool, huge_pages: bool) -> MemoryChoice:
    """Set up memory for what is allocated from here on; call it after ``load_kernels``.

    ``mapped``: tensors of 2 MiB and more get mappings of their own, which ``keep_freed_memory``
    can keep. ``huge_pages``: these, and KV caches, are advised to lie on huge pages.
    """
    library = native_library()
    if library is None:
        return MemoryChoice("system", _NOT_NATIVE, "off", _NOT_NATIVE)
    try:
        # The kernel's setting: always, madvise or never.
        system = _SYSTEM_HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        system = "never"
    advised = huge_pages and system in ("always", "madvise")
    library.rbln_emulator_map_large_tensors(int(mapped))
    library.rbln_emulator_use_huge_pages(int(advised))
    return MemoryChoice(
        "mapped" if mapped else "system",
        "" if mapped else "requested",
        "advised" if advised else "off",
        f"{_SYSTEM_HUGE_PAGES} says {system}" if huge_pages else "requested",
    )


def advise_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for a contiguous CPU tensor [...], if huge pages were chosen."""
    library = native_library()
    if library is not None:
        address, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        library.rbln_emulator_advise_huge_pages(address, size)


def keep_freed_memory(most_bytes: int = _KEPT_BYTES) -> None:
    """Reuse the memory of large tensors across steps; call once all weights are loaded."""
    library = native_library()
    if library is not None:
        library.rbln_emulator_keep_freed_mappings(ctypes.c_size_t(most_bytes))


def reserve_pages(tensor: Tensor) -> None:
    """Map every page of ``tensor`` [...] now, its content unchanged.

    Raises ``DeviceMemoryError`` if the system does not have as many pages.
    """
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _POPULATE_WRITE) == 0:
        return
    reason = ctypes.get_errno()
    if reason != errno.EINVAL:
        raise DeviceMemoryError(f"cannot reserve {size} bytes: {os.strerror(reason)}")
    # Kernels before Linux 5.14 map pages by their first write only.
    tensor.view(torch.uint8).flatten()[:: mmap.PAGESIZE] = 0


def zeros_on_demand(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros of ``shape`` [...], on huge pages if chosen; pages are mapped on first use.

    Raises ``DeviceMemoryError`` if the system refuses the address range.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DeviceMemoryError(f"cannot map {size} bytes: {error.strerror}") from error
    zeros = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
    advise_huge_pages(zeros)
    return zeros


def huge_page_bytes() -> int | None:
    """Bytes of this process that lie on huge pages now; None where the kernel does not tell."""
    try:
        lines = _ROLLUP.read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")]
    return 1024 * sizes[0] if sizes else None


class HostKvMemory:
    """See ``KvMemory``: graphs share caches by being given the tensors."""

    def __init__(self, *, reserved: bool = False) -> None:
        """Pages of caches are mapped on first use, or, if ``reserved``, by ``allocate``."""
        self._reserved = reserved

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros of ``shape`` [...].

        Raises ``DeviceMemoryError`` if the system has too little memory.
        """
        try:
            cache = zeros_on_demand(tuple(shape), dtype)
            if self._reserved and cache.nbytes:
                reserve_pages(cache)
        except DeviceMemoryError as error:
            pages = "reserved" if self._reserved else "on_demand"
            raise DeviceMemoryError(
                f"kv_cache_pages={pages}: KV cache of {name}: {error}; lower "
                "--kv-cache-memory-bytes or --max-num-seqs"
            ) from error
        return cache

    def copy_heads(self, caches: Sequence[Tensor], copies: Sequence[HeadCopy]) -> None:
        for cache in caches:
            for source, target, _, tokens in copies:
                cache[target, ..., :tokens, :] = cache[source, ..., :tokens, :]

    def read_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        page.copy_(cache[block, :, :, :, slot : slot + page.shape[3]])

    def write_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        cache[block, :, :, :, slot : slot + page.shape[3]].copy_(page)

    def shared_blocks(self, cache: Tensor) -> Tensor:
        """Return ``cache`` [num_blocks, ...]."""
        return cache

    def restore_window(self, cache: Tensor, log: Tensor, move: WindowRestore) -> None:
        held = min(move.num_tokens, cache.shape[4])
        # [2, Hkv, 1, pages, page_tokens, D] -> [2, Hkv, 1, tokens, D]
        tokens = log[list(move.pages)].movedim(0, 3).flatten(3, 4)
        cache[move.block, :, :, :, :held] = tokens[:, :, :, -held:]

    def store_window(self, cache: Tensor, log: Tensor, move: WindowStore) -> None:
        end = move.slot + log.shape[4]
        log[move.page] = cache[move.block, :, :, :, move.slot : end]
