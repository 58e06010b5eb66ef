"""Places pages that were read in the KV cache, where the usual prefix hits find them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rbln_backend.kv_cache.coordinator import RblnKvCoordinator
from rbln_backend.kv_cache.transfers import PageMove, PagePart
from rbln_backend.vllm_compat.surface import Request


@dataclass
class PagePlace:
    """Blocks that hold a growing prefix of a request that has not begun."""

    owner: Request
    """The request under another id, so that its own blocks are not these."""
    tokens: int
    """Tokens up to the end of the latest page."""


class Placement:
    """Owns the blocks of placed pages until their request begins.

    The blocks are registered like those of a computed prefix. Their release leaves them in the
    prefix cache, which may evict them like any other.
    """

    def __init__(self, coordinator: RblnKvCoordinator, page_tokens: int) -> None:
        self._coordinator = coordinator
        self._pool = coordinator.block_pool
        self._page_tokens = page_tokens

    def first_token(self, hit: int) -> int:
        """Return where the first page of a place begins: the block in which a local ``hit`` ends.

        A block is found by the whole prefix that it ends, so its head must be placed, too.
        """
        return min(hit // m.block_size * m.block_size for m in self._coordinator.paged)

    def begin(self, request: Request, first_token: int) -> PagePlace:
        """Return a place of ``request`` without blocks."""
        owner = copy.copy(request)
        owner.request_id = f"kv-tier:{request.request_id}"
        for manager in self._coordinator.paged:
            blocks = first_token // manager.block_size
            manager.req_to_blocks[owner.request_id] = [self._pool.null_block] * blocks
            manager.num_cached_block[owner.request_id] = blocks
        return PagePlace(owner, first_token)

    def add(self, place: PagePlace, pages: Sequence[Tensor], spared: int) -> list[PageMove]:
        """Return the moves of the next ``pages`` [page_bytes]; fewer if it would leave few blocks.

        ``spared`` blocks of the pool stay free.
        """
        moves: list[PageMove] = []
        for page in pages:
            end = place.tokens + self._page_tokens
            if self._pool.get_num_free_blocks() - self._missing(place, end) < spared:
                break
            self._grow(place, end)
            moves.append(PageMove(page, self.parts(place.owner, place.tokens)))
            place.tokens = end
        if moves:
            for manager in self._coordinator.paged:
                manager.cache_blocks(place.owner, place.tokens, replay_boundaries=())
        return moves

    def parts(self, request: Request, start: int) -> list[PagePart]:
        """Return the parts of the page that begins at ``start`` tokens, in the request's blocks."""
        parts: list[PagePart] = []
        for manager in self._coordinator.paged:
            block = manager.req_to_blocks[request.request_id][start // manager.block_size]
            slot, group = start % manager.block_size, manager.kv_cache_group_id
            parts.append(PagePart(group, block.block_id, slot, self._page_tokens))
        return parts

    def release(self, place: PagePlace) -> None:
        """Leave the blocks of ``place`` to the prefix cache."""
        for manager in self._coordinator.paged:
            manager.free(place.owner.request_id)

    def _missing(self, place: PagePlace, end: int) -> int:
        """Return the blocks that ``place`` lacks for tokens up to ``end``."""
        owned = ((m, m.req_to_blocks[place.owner.request_id]) for m in self._coordinator.paged)
        return sum(-(-end // m.block_size) - len(blocks) for m, blocks in owned)

    def _grow(self, place: PagePlace, end: int) -> None:
        """Give ``place`` blocks for the page that ends at ``end``."""
        for manager in self._coordinator.paged:
            blocks = manager.req_to_blocks[place.owner.request_id]
            if len(blocks) * manager.block_size < end:
                blocks.extend(self._pool.get_new_blocks(1))
