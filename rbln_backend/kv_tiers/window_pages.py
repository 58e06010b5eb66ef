"""Pages of window groups: between the prefix log and host memory."""

from __future__ import annotations

from rbln_backend.kv_cache.coordinator import RblnKvCoordinator
from rbln_backend.kv_cache.transfers import PageMove, PagePart
from rbln_backend.kv_tiers.page_layout import PageLayout
from rbln_backend.kv_tiers.page_memory import new_page
from rbln_backend.kv_tiers.page_store import WindowPage
from rbln_backend.vllm_compat.surface import Request


class WindowPages:
    """Moves of the pages of all window groups of a model; it may have none.

    A page of KV tiers is some pages of the log. The log has only what the window block held after a
    step, so not every page of a prompt can be stored.
    """

    def __init__(self, coordinator: RblnKvCoordinator, layout: PageLayout) -> None:
        self._managers = {m.kv_cache_group_id: m for m in coordinator.windows}
        self._layout = layout
        self._unit = coordinator.block_pool.hash_block_size
        self._units = layout.tokens // self._unit

    @property
    def spans(self) -> dict[int, int]:
        """Pages before its end that a prefix needs, by group."""
        tokens = self._layout.tokens
        return {group: -(-m.log.window // tokens) for group, m in self._managers.items()}

    def load(self, request: Request, found: WindowPage) -> PageMove:
        """Return the move of a page that was read into the log."""
        first = found.number * self._units
        pages = self._managers[found.group].refill(request, first, first + self._units)
        return PageMove(found.page, self._parts(found.group, pages))

    def store(self, request: Request, group: int, number: int) -> PageMove | None:
        """Return the move of a page out of the log, None where the log lacks a part of it."""
        pages = self._managers[group].log.find(self._hashes(request, number))
        if pages is None:
            return None
        page = new_page(self._layout.window_bytes[group])
        return PageMove(page, self._parts(group, pages))

    def is_unchanged(self, request: Request, group: int, number: int, move: PageMove) -> bool:
        """Return whether the log still has the page where ``move`` reads it."""
        pages = self._managers[group].log.find(self._hashes(request, number))
        return pages == [part.block for part in move.parts]

    def _hashes(self, request: Request, number: int) -> list[bytes]:
        return list(request.block_hashes[number * self._units : (number + 1) * self._units])

    def _parts(self, group: int, pages: list[int]) -> list[PagePart]:
        return [PagePart(group, page, 0, self._unit) for page in pages]
