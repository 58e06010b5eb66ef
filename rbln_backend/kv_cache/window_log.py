"""The prefix log of one window group: an index of pages by prefix hash (pure).

A window block keeps only the last tokens of one request. For requests that share a prefix, the KV
of window layers is also logged in pages of a few tokens. A page is found by the hash of the prefix
that ends with it. A request can resume at position p if the pages of the ``window`` tokens before p
are in the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from rbln_backend.kv_cache.layout import page_span


class WindowLog:
    """Pages 1..``num_pages`` of ``page_tokens`` tokens, evicted least recently used first.

    Callers pass one prefix hash per page of a request, each over all tokens up to the page's end.
    """

    def __init__(self, num_pages: int, page_tokens: int, window: int) -> None:
        self._free = list(range(num_pages, 0, -1))
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        self._page_tokens = page_tokens
        self.window = window
        self.num_pages = num_pages
        self.on_evicted: Callable[[bytes], None] | None = None
        """Called with the prefix hash of a page that another prefix replaces."""

    @property
    def num_used(self) -> int:
        """Pages that hold a prefix."""
        return len(self._pages)

    def longest(self, hashes: Sequence[bytes], max_tokens: int) -> int:
        """Return the largest resumable position up to ``max_tokens``, at a page's end; 0: none."""
        end = run = 0
        for page in range(min(max_tokens // self._page_tokens, len(hashes)) - 1, -1, -1):
            if hashes[page] not in self._pages:
                run = 0
                continue
            if run == 0:
                end = page + 1
            run += 1
            first, _ = page_span(end * self._page_tokens, self.window, self._page_tokens)
            if page <= first:
                return end * self._page_tokens
        return 0

    def use(self, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Return the pages of the window before ``num_tokens``, a position from ``longest``.

        They become the most recently used ones.
        """
        first, end = page_span(num_tokens, self.window, self._page_tokens)
        for block_hash in hashes[first:end]:
            self._pages.move_to_end(block_hash)
        return [self._pages[block_hash] for block_hash in hashes[first:end]]

    def add(self, block_hash: bytes) -> int | None:
        """Return a page for this prefix, evicting another if need be; None if it is logged."""
        if block_hash in self._pages:
            self._pages.move_to_end(block_hash)
            return None
        page = self._free.pop() if self._free else self._evict()
        self._pages[block_hash] = page
        return page

    def _evict(self) -> int:
        """Remove the least recently used prefix; return its page."""
        block_hash, page = self._pages.popitem(last=False)
        if self.on_evicted is not None:
            self.on_evicted(block_hash)
        return page

    def find(self, hashes: Sequence[bytes]) -> list[int] | None:
        """Return the pages of these prefixes, or None if one is not logged."""
        if all(block_hash in self._pages for block_hash in hashes):
            return [self._pages[block_hash] for block_hash in hashes]
        return None

    def refill(self, block_hash: bytes) -> int:
        """Return the page of this prefix, a new one if it is not logged."""
        added = self.add(block_hash)
        return self._pages[block_hash] if added is None else added

    def clear(self) -> None:
        """Remove every prefix."""
        self._free.extend(self._pages.values())
        self._pages.clear()
