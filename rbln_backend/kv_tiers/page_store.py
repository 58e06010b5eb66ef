"""Both tiers behind two background threads: a step neither reads nor writes a file."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import NamedTuple

from torch import Tensor

from rbln_backend.kv_tiers.folder_tier import FolderTier
from rbln_backend.kv_tiers.memory_tier import MemoryTier
from rbln_backend.kv_tiers.page_layout import PageLayout
from rbln_backend.kv_tiers.page_memory import new_page
from rbln_backend.kv_tiers.tier_counts import TierCounts

logger = logging.getLogger(__name__)

# Bytes of pages that one prefix has read and not placed, and of pages that wait to be written.
_READ_BYTES = 64 << 20
_WAITING_BYTES = 256 << 20


@dataclass(frozen=True)
class ReadPlan:
    """Keys of the pages of one prefix."""

    layout: PageLayout
    keys: Sequence[bytes]
    """Of the pages of paged layers that the KV cache lacks, in order."""
    first: int
    """Number of the first of them in the prompt."""
    window_keys: Mapping[int, Sequence[bytes]]
    """Of all pages of the prompt, by window group."""
    spans: Mapping[int, int]
    """Pages before its end that a prefix needs, by window group."""


class WindowPage(NamedTuple):
    """A page of one window group."""

    group: int
    number: int
    """Its number in the prompt."""
    page: Tensor


class PrefixRead:
    """Pages of one prefix, in order, while they are read."""

    def __init__(self, most: int) -> None:
        """``most``: pages of paged layers that lie here at a time."""
        self._most = most
        self._pages: deque[Tensor] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self.windows: list[WindowPage] = []
        """Complete once the reading is over."""

    @property
    def is_over(self) -> bool:
        """True once nothing is left to take and nothing more will come."""
        with self._changed:
            return self._ended and not self._pages

    def put(self, page: Tensor) -> bool:
        """Add a page [page_bytes] once there is room; False after ``end``."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._pages) < self._most)
            if not self._ended:
                self._pages.append(page)
            return not self._ended

    def take(self, most: int) -> list[Tensor]:
        """Return at most ``most`` of the next pages [page_bytes] that are there."""
        with self._changed:
            taken = [self._pages.popleft() for _ in range(min(most, len(self._pages)))]
            self._changed.notify_all()
            return taken

    def end(self) -> None:
        """Let no page follow."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class PageStore:
    """Pages by key in memory, in a folder, or in both."""

    def __init__(
        self, memory: MemoryTier | None, folder: FolderTier | None, counts: TierCounts
    ) -> None:
        self._memory, self._folder, self._counts = memory, folder, counts
        self._reader = ThreadPoolExecutor(1, "kv-tier-read")
        self._writer = ThreadPoolExecutor(1, "kv-tier-write")
        self._waiting = 0
        self._is_failing = False
        self._known: set[bytes] = set()
        """Pages in the folder, and those that wait to be written."""
        self._lock = threading.Lock()
        if folder is not None:
            self._writer.submit(self._list_known, folder)

    def _list_known(self, folder: FolderTier) -> None:
        keys = set(folder.known())
        with self._lock:
            self._known |= keys

    @property
    def memory_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.num_bytes

    @property
    def folder_bytes(self) -> int:
        return 0 if self._folder is None else self._folder.num_bytes

    def knows(self, key: bytes) -> bool:
        """Return whether the page is stored or about to be, as far as this process knows."""
        return key in self._known or (self._memory is not None and key in self._memory)

    def read(self, plan: ReadPlan) -> PrefixRead:
        """Start to read the pages of the longest prefix that can be resumed."""
        job = PrefixRead(max(1, _READ_BYTES // plan.layout.num_bytes))
        self._reader.submit(self._read_all, plan, job)
        return job

    @property
    def room(self) -> int:
        """Bytes that ``write`` may take now, so that those that wait stay few."""
        return max(0, _WAITING_BYTES - self._waiting)

    def write(self, key: bytes, page: Tensor) -> None:
        """Store ``page`` [page_bytes] later."""
        with self._lock:
            self._waiting += page.nbytes
            self._known.add(key)
        self._writer.submit(self._write, key, page)

    def clear(self) -> None:
        """Forget all pages of this origin, in order with the writes before."""
        self._writer.submit(self._clear).result()

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)

    def _read_all(self, plan: ReadPlan, job: PrefixRead) -> None:
        try:
            keys = plan.keys[: self._resumable(plan) - plan.first] if plan.spans else plan.keys
            read = 0
            for read, key in enumerate(keys, start=1):  # noqa: B007
                page = self._fetch(key, plan.layout.num_bytes)
                if page is None or not job.put(page):
                    return
            end = plan.first + read
            for group, span in plan.spans.items() if read else ():
                for number in range(max(0, end - span), end):
                    key = plan.window_keys[group][number]
                    page = self._fetch(key, plan.layout.window_bytes[group])
                    if page is not None:
                        job.windows.append(WindowPage(group, number, page))
        except Exception:
            logger.exception("KV tiers: reading failed; the prefix is computed")
        finally:
            job.end()

    def _resumable(self, plan: ReadPlan) -> int:
        """Return the pages of the longest prefix whose end has the pages of all windows."""
        held = takewhile(self._holds, plan.keys)
        for end in range(plan.first + sum(1 for _ in held), plan.first, -1):
            wanted = (plan.window_keys[g][max(0, end - n) : end] for g, n in plan.spans.items())
            if all(map(self._holds, chain.from_iterable(wanted))):
                return end
        return plan.first

    def _holds(self, key: bytes) -> bool:
        is_held = self._memory is not None and key in self._memory
        return is_held or (self._folder is not None and key in self._folder)

    def _fetch(self, key: bytes, num_bytes: int) -> Tensor | None:
        page = None if self._memory is None else self._memory.get(key)
        if page is not None:
            self._counts.add_read("memory")
            return page
        if self._folder is None:
            self._missed(key, "miss")
            return None
        page = new_page(num_bytes)
        found = self._folder.read(key, page.numpy().data)
        if not found:
            self._missed(key, "miss" if found is None else "damaged")
            return None
        self._counts.add_read("folder")
        if self._memory is not None:
            self._memory.put(key, page)
        return page

    def _missed(self, key: bytes, why: str) -> None:
        self._counts.add_read(why)
        with self._lock:
            self._known.discard(key)

    def _write(self, key: bytes, page: Tensor) -> None:
        is_in_folder = False
        try:
            if self._memory is not None:
                self._memory.put(key, page)
                self._counts.add_write("memory")
            if self._folder is not None and not self._folder.is_read_only:
                is_in_folder = self._write_file(self._folder, key, page)
        finally:
            with self._lock:
                self._waiting -= page.nbytes
                if not is_in_folder:
                    self._known.discard(key)

    def _write_file(self, folder: FolderTier, key: bytes, page: Tensor) -> bool:
        """Return whether the page was written."""
        try:
            evicted = folder.write(key, page.numpy().data)
        except OSError as error:
            self._counts.add_write("failed")
            if not self._is_failing:
                logger.warning("KV tiers: pages cannot be written, requests go on: %s", error)
            self._is_failing = True
            return False
        self._is_failing = False
        self._counts.add_write("folder")
        with self._lock:
            self._known.difference_update(evicted)
        return True

    def _clear(self) -> None:
        if self._memory is not None:
            self._memory.clear()
        if self._folder is not None and not self._folder.is_read_only:
            self._folder.clear()
        with self._lock:
            self._known.clear()
