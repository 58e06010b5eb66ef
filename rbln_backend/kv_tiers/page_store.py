"""Both tiers behind two background threads: a step neither reads nor writes a file."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rbln_backend.kv_tiers.folder_tier import FolderTier
from rbln_backend.kv_tiers.memory_tier import MemoryTier
from rbln_backend.kv_tiers.tier_counts import TierCounts

logger = logging.getLogger(__name__)

# Bytes of pages that one prefix has read and not placed, and of pages that wait to be written.
_READ_BYTES = 64 << 20
_WAITING_BYTES = 256 << 20


class PrefixRead:
    """Pages of one prefix, in order, while they are read."""

    def __init__(self, most: int) -> None:
        """``most``: pages that lie here at a time."""
        self._most = most
        self._pages: deque[Tensor] = deque()
        self._changed = threading.Condition()
        self._ended = False

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
        self,
        page_bytes: int,
        memory: MemoryTier | None,
        folder: FolderTier | None,
        counts: TierCounts,
    ) -> None:
        self.page_bytes = page_bytes
        self._memory, self._folder, self._counts = memory, folder, counts
        self._most_waiting = max(1, _WAITING_BYTES // page_bytes)
        self._reader = ThreadPoolExecutor(1, "kv-tier-read")
        self._writer = ThreadPoolExecutor(1, "kv-tier-write")
        self._waiting = 0
        self._is_failing = False
        self._known: set[bytes] = set()
        self._lock = threading.Lock()
        if folder is not None:
            self._writer.submit(self._list_known, folder)

    def _list_known(self, folder: FolderTier) -> None:
        keys = set(folder.known())
        with self._lock:
            self._known |= keys
        self._counts.folder_bytes = folder.num_bytes

    def knows(self, key: bytes) -> bool:
        """Return whether the page is stored or about to be, as far as this process knows."""
        return key in self._known

    def read(self, keys: Sequence[bytes]) -> PrefixRead:
        """Start to read pages, up to the first that is missing."""
        job = PrefixRead(max(1, _READ_BYTES // self.page_bytes))
        self._reader.submit(self._read_all, keys, job)
        return job

    @property
    def room(self) -> int:
        """Pages that ``write`` may take now, so that those that wait stay few."""
        return max(0, self._most_waiting - self._waiting)

    def write(self, key: bytes, page: Tensor) -> None:
        """Store ``page`` [page_bytes] later."""
        with self._lock:
            self._waiting += 1
            self._known.add(key)
        self._writer.submit(self._write, key, page)

    def clear(self) -> None:
        """Forget all pages of this origin, in order with the writes before."""
        self._writer.submit(self._clear).result()

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)

    def _read_all(self, keys: Sequence[bytes], job: PrefixRead) -> None:
        try:
            for key in keys:
                page = self._fetch(key)
                if page is None or not job.put(page):
                    break
        except Exception:
            logger.exception("KV tiers: reading failed; the prefix is computed")
        finally:
            job.end()

    def _fetch(self, key: bytes) -> Tensor | None:
        page = None if self._memory is None else self._memory.get(key)
        if page is not None:
            self._counts.add_read("memory")
            return page
        if self._folder is None:
            self._missed(key, "miss")
            return None
        page = torch.empty(self.page_bytes, dtype=torch.uint8)
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
        try:
            if self._memory is not None:
                self._memory.put(key, page)
                self._counts.add_write("memory")
                self._counts.memory_bytes = self._memory.num_bytes
            if self._folder is not None and not self._folder.is_read_only:
                self._write_file(self._folder, key, page)
        finally:
            with self._lock:
                self._waiting -= 1

    def _write_file(self, folder: FolderTier, key: bytes, page: Tensor) -> None:
        try:
            evicted = folder.write(key, page.numpy().data)
        except OSError as error:
            self._counts.add_write("failed")
            if not self._is_failing:
                logger.warning("KV tiers: pages cannot be written, requests go on: %s", error)
            self._is_failing = True
            with self._lock:
                self._known.discard(key)
            return
        self._is_failing = False
        self._counts.add_write("folder")
        self._counts.folder_bytes = folder.num_bytes
        with self._lock:
            self._known.difference_update(evicted)

    def _clear(self) -> None:
        if self._memory is not None:
            self._memory.clear()
            self._counts.memory_bytes = 0
        if self._folder is not None and not self._folder.is_read_only:
            self._folder.clear()
            self._counts.folder_bytes = self._folder.num_bytes
        with self._lock:
            self._known.clear()
