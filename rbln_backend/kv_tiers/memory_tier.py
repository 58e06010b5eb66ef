"""The tier in host memory: pages by key, least recently used first out."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor


class MemoryTier:
    """Holds pages of equal size up to a number of bytes; of any thread."""

    def __init__(self, max_bytes: int, page_bytes: int) -> None:
        self._most = max_bytes // page_bytes
        self._page_bytes = page_bytes
        self._pages: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return len(self._pages) * self._page_bytes

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
            self._pages[key] = page
            self._pages.move_to_end(key)
            while len(self._pages) > self._most:
                self._pages.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._pages.clear()
