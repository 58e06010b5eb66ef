"""The tier in host memory: pages by key, least recently used first out."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor


class MemoryTier:
    """Holds pages up to a number of bytes; of any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pages: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def get(self, key: bytes) -> Tensor | None:
        """Return the page [page_bytes] of ``key``, not to be changed, or None."""
        with self._lock:
            page = self._pages.get(key)
            if page is not None:
                self._pages.move_to_end(key)
            return page

    def put(self, key: bytes, page: Tensor) -> None:
        """Keep ``page`` [page_bytes] itself, not a copy."""
        with self._lock:
            former = self._pages.pop(key, None)
            self._bytes += page.nbytes - (0 if former is None else former.nbytes)
            self._pages[key] = page
            while self._bytes > self._max_bytes:
                self._bytes -= self._pages.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
            self._bytes = 0
