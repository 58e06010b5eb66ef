"""Weights on small pages while a process starts, on huge pages soon after.

On some virtual machines the host lends memory only when a page is first used, and takes free huge
pages back: 2.4 s of processor time per GiB (Firecracker), while small pages come from memory that
the host has lent before, at 0.5 s per GiB. There weights are loaded on small pages, and a thread
replaces these by huge pages once the engine serves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

HUGE_PAGE = 2 << 20
MemoryRange = tuple[int, int]
"""Address and bytes."""
_SLOW_S = 2e-3
"""Processor time of a huge page's first use; clearing it takes 0.1 to 0.5 ms."""
_MADVISE = ctypes.CDLL(None).madvise
_PROBED = range(24, 513)
"""Fewest and most probed pages. A process that has just ended leaves hundreds that are fast."""
_SLOW_PAGES = 3
_COLLAPSE = 25
"""MADV_COLLAPSE of linux/mman.h, Linux 6.1 and later; Python's mmap does not name it."""
_NICENESS = 10
"""A tenth of what a busy kernel thread gets of a core."""
_DELAY_S = 3.0
"""The engine's warm-up ends before the server's self-test and first answer."""


class WeightPages:
    """Pages of the weights of this process; inactive until ``defer``."""

    def __init__(self) -> None:
        self._use_huge_pages: Callable[[int], object] | None = None
        self._ranges: list[MemoryRange] = []

    def defer(self, use_huge_pages: Callable[[int], object] | None) -> None:
        """Let weights get their huge pages later; None: at once, as other tensors do.

        ``use_huge_pages`` sets whether large tensors are mapped on huge pages.
        """
        self._use_huge_pages, self._ranges = use_huge_pages, []

    @property
    def is_deferring(self) -> bool:
        """True between ``defer`` with a function and ``defer`` without."""
        return self._use_huge_pages is not None

    @contextmanager
    def small(self) -> Iterator[None]:
        """Map tensors that are made inside on small pages, if huge pages come later."""
        if self._use_huge_pages is None:
            yield
            return
        self._use_huge_pages(0)
        try:
            yield
        finally:
            self._use_huge_pages(1)

    def add(self, *ranges: MemoryRange) -> None:
        """Remember the memory of weights, but not the weights: they may be freed."""
        if self.is_deferring:
            self._ranges += ranges

    def replace_in_background(self) -> threading.Thread | None:
        """Start to replace the small pages of all added ranges; None if there is nothing to do.

        Content and addresses stay. The thread has a low priority and pauses as long as it
        works: while a page is replaced, kernels that read it wait, up to 12 ms (measured).
        """
        starts = sorted({start for whole in self._ranges for start in _huge_pages(*whole)})
        self._ranges = []
        if not starts:
            return None
        thread = threading.Thread(
            target=_replace_all, args=(starts,), name="huge-pages", daemon=True
        )
        thread.start()
        return thread


WEIGHT_PAGES = WeightPages()


def lends_slowly(weight_bytes: int = 0) -> bool:
    """Return True if first uses of huge pages take much longer than clearing them.

    False where the system cannot replace small pages on request. Probes as many pages as
    ``weight_bytes`` need, 48 MiB to 1 GiB, until three were slow.
    """
    slow = 0
    probed = min(max(weight_bytes // HUGE_PAGE, _PROBED.start), _PROBED.stop - 1)
    with mmap.mmap(-1, (probed + 1) * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        pages = _huge_pages(start, len(memory))
        for page in pages:
            began = time.thread_time()
            memory[page - start] = 1
            slow += time.thread_time() - began > _SLOW_S
            if slow == _SLOW_PAGES:
                return _advise(page, _COLLAPSE)
    return False


def _huge_pages(start: int, size: int) -> range:
    """Return the addresses of the whole huge pages in a range of memory."""
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    return range(first, (start + size) // HUGE_PAGE * HUGE_PAGE, HUGE_PAGE)


def _advise(start: int, advice: int) -> bool:
    """Return True if the system follows ``advice`` for the huge page at ``start``."""
    address, size = ctypes.c_void_p(start), ctypes.c_size_t(HUGE_PAGE)
    return bool(_MADVISE(address, size, advice) == 0)


def _replace_all(starts: Iterable[int]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    time.sleep(_DELAY_S)
    for start in starts:
        began = time.thread_time()
        # The system refuses memory that was freed meanwhile; that of others keeps its content.
        _advise(start, mmap.MADV_HUGEPAGE)
        _advise(start, _COLLAPSE)
        time.sleep(time.thread_time() - began)
