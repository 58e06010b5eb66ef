"""Managers of the blocks that requests own, one per KV cache group, behind vLLM's interface.

A window block keeps only the last tokens of one request. For requests that share a prefix, the KV
of window layers is also logged in pages of a few tokens. A page is found by the hash of the prefix
that ends with it. A request can resume at position p if the pages of the ``window`` tokens before p
are in the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from rbln_backend.core import HeadCopy, WindowRestore, WindowStore, WindowTransfers
from rbln_backend.kv_cache.layout import page_span
from rbln_backend.kv_cache.specs import AppendedWindowSpec, PagedSpec, WindowSpec


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
        if self._free:
            page = self._free.pop()
        else:
            # The least recently used prefix.
            evicted, page = self._pages.popitem(last=False)
            if self.on_evicted is not None:
                self.on_evicted(evicted)
        self._pages[block_hash] = page
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
        self._free.extend(self._pages.values())
        self._pages.clear()


def report_stored(pool: BlockPool, request: Request, first: int, end: int, group: int) -> None:
    """Queue one event for the units ``first`` to ``end`` of ``request``, where events are on.

    A unit is ``pool.hash_block_size`` tokens. Upstream's events have whole blocks only.
    """
    if not pool.enable_kv_cache_events or first >= end:
        return
    unit, hashes = pool.hash_block_size, request.block_hashes
    extra_keys, position = [], 0
    for index in range(first, end):
        keys, position = generate_block_hash_extra_keys(
            request, index * unit, (index + 1) * unit, position
        )
        extra_keys.append(keys)
    lora = request.lora_request
    pool.kv_event_queue.append(
        BlockStored(
            block_hashes=[maybe_convert_block_hash(x) for x in hashes[first:end]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * unit : end * unit]),
            block_size=unit,
            lora_id=lora.adapter_id if lora else None,
            medium=pool.medium,
            lora_name=lora.name if lora else None,
            extra_keys=extra_keys,
            group_idx=group,
            session_id=request.session_id,
        )
    )


def get_units(event: BlockStored, first: int, end: int) -> BlockStored:
    """Return ``event`` with its units ``first`` to ``end`` only."""
    if (first, end) == (0, len(event.block_hashes)):
        return event
    size, keys = event.block_size, event.extra_keys
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[first:end],
        parent_block_hash=event.block_hashes[first - 1] if first else event.parent_block_hash,
        token_ids=event.token_ids[first * size : end * size],
        extra_keys=keys[first:end] if keys else None,
    )


class HeadSharingManager(SingleTypeKVCacheManager):
    """Blocks that can be hit at any multiple of the pool's hash granularity.

    Upstream copies the shared head of a block into the new request's own block; it registers the
    end of a prompt only. Here every boundary of every block is registered, and copies have the
    number of shared tokens.
    """

    def __init__(self, kv_cache_spec: PagedSpec | AppendedWindowSpec, **options: Any) -> None:
        super().__init__(kv_cache_spec, **options)
        self._num_indexed: dict[str, int] = {}
        self._head_tokens: dict[str, int] = {}
        self._head_copies: list[HeadCopy] = []

    def take_head_copies(self) -> list[HeadCopy]:
        """Return the copies decided since the last call, as ``take_pending_cow_copies``."""
        taken, self._head_copies = self._head_copies, []
        return taken

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self._head_tokens[request_id] = num_local_computed_tokens % self.block_size

    def _apply_cow(
        self, request_id: str, block_idx: int, source_block: KVCacheBlock, cow_block: KVCacheBlock
    ) -> None:
        super()._apply_cow(request_id, block_idx, source_block, cow_block)
        ends = (source_block.block_id, cow_block.block_id)
        tokens = self._head_tokens[request_id]
        self._head_copies.append(HeadCopy(*ends, self.kv_cache_group_id, tokens))

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        first_block = self.num_cached_block.get(request.request_id, 0)
        SingleTypeKVCacheManager.cache_blocks(
            self, request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )
        unit = self.block_pool.hash_block_size
        num_indexed = self._num_indexed.get(request.request_id, 0)
        end = num_tokens // unit * unit
        if unit == self.block_size or end <= num_indexed:
            return
        self._num_indexed[request.request_id] = end
        blocks = self.req_to_blocks[request.request_id]
        for index in range(first_block, -(-end // self.block_size)):
            start, stop = index * self.block_size, min(end, (index + 1) * self.block_size)
            if blocks[index].is_null:
                continue
            # Upstream drops the heads of a block when it registers the whole block.
            is_whole = stop % self.block_size == 0
            known = start if is_whole else max(start, num_indexed)
            # Upstream's ``cache_partial_block`` drops a block's shorter heads for each longer one:
            # every unit of a block would register all of its heads again.
            for head in range(known + unit, stop + 1, unit):
                if head % self.block_size:
                    prefix = request.block_hashes[head // unit - 1]
                    key = make_block_hash_with_group_id(prefix, self.kv_cache_group_id)
                    self.block_pool._insert_block_hash(key, blocks[index], num_tokens=head)
            group = self.kv_cache_group_id
            report_stored(self.block_pool, request, known // unit, stop // unit, group)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._num_indexed.pop(request_id, None)
        self._head_tokens.pop(request_id, None)
        return list(super().pop_blocks_for_free(request_id))


class PagedManager(HeadSharingManager, FullAttentionManager):
    """Full attention: every block of a prefix is found, and the head of the last one."""


class AppendedWindowManager(HeadSharingManager, SlidingWindowManager):
    """Sliding windows in pages: the blocks in a prefix's window are found, and the last's head.

    Upstream finds whole blocks only.
    """

    def longest(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Return the longest prefix, up to ``max_tokens``, whose window is in the cache.

        A multiple of the pool's hash granularity.
        """
        unit = self.block_pool.hash_block_size
        length = max_tokens // unit * unit
        end, oldest = length, self.get_num_skipped_tokens(length)
        while end > oldest:
            if self._cached(block_hashes, end) is not None:
                end = (end - 1) // self.block_size * self.block_size
                continue
            # Longer prefixes need the rest of this block, too.
            length = end = end - unit
            oldest = self.get_num_skipped_tokens(length)
        return length

    def find(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> list[KVCacheBlock]:
        """Return the blocks of a prefix that ``longest`` found, null blocks before its window."""
        first = self.get_num_skipped_tokens(num_tokens) // self.block_size
        found = [self._null_block] * first
        for start in range(first * self.block_size, num_tokens, self.block_size):
            block = self._cached(block_hashes, min(start + self.block_size, num_tokens))
            assert block is not None, "the block was found before"
            found.append(block)
        return found

    def _cached(self, block_hashes: Sequence[BlockHash], end: int) -> KVCacheBlock | None:
        """Return a block that has the tokens before ``end`` from the last boundary of blocks on."""
        prefix = block_hashes[end // self.block_pool.hash_block_size - 1]
        found = self.block_pool.get_cached_block(prefix, [self.kv_cache_group_id])
        return found[0] if found else None


class WindowManager(SingleTypeKVCacheManager):
    """Manager of one window block per request, and of the log that later requests resume from."""

    def __init__(self, kv_cache_spec: WindowSpec, **options: Any) -> None:
        super().__init__(kv_cache_spec, **options)
        self._spec = kv_cache_spec
        self._blocks = self.block_pool
        if kv_cache_spec.own_blocks:
            self._blocks = BlockPool(
                kv_cache_spec.own_blocks,
                enable_caching=False,
                hash_block_size=kv_cache_spec.page_tokens,
            )
        self.log = WindowLog(
            max(0, kv_cache_spec.log_pages - 1), kv_cache_spec.page_tokens, kv_cache_spec.window
        )
        self.log.on_evicted = self._report_evicted
        self._transfers = WindowTransfers()

    @property
    def num_blocks(self) -> int:
        return int(self._blocks.num_gpu_blocks) - 1

    @property
    def num_blocks_in_use(self) -> int:
        return sum(1 for blocks in self.req_to_blocks.values() if blocks)

    def take_transfers(self) -> WindowTransfers:
        """Return the transfers decided since the last call."""
        taken, self._transfers = self._transfers, WindowTransfers()
        return taken

    def get_num_blocks_to_allocate(self, request_id: str, *_: Any, **__: Any) -> int:
        """Return the blocks of vLLM's pool that the request lacks; 0 where the group has a pool.

        The group's own pool has a block for every request.
        """
        if self._blocks is not self.block_pool or self.req_to_blocks.get(request_id):
            return 0
        return 1

    def allocate_new_blocks(self, request_id: str, *_: Any, **__: Any) -> list[KVCacheBlock]:
        held = self.req_to_blocks[request_id]
        if held:
            return []
        held.extend(self._blocks.get_new_blocks(1))
        return list(held)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        *_: Any,
        **__: Any,
    ) -> None:
        """Allocate a window block and queue its refill from the pages ``new_computed_blocks``."""
        (block,) = self.allocate_new_blocks(request_id)
        self.num_cached_block[request_id] = num_local_computed_tokens // self._spec.page_tokens
        self._transfers.restores.append(
            WindowRestore(
                group=self.kv_cache_group_id,
                block=block.block_id,
                pages=tuple(page.block_id for page in new_computed_blocks),
                num_tokens=num_local_computed_tokens,
            )
        )

    def cache_blocks(self, request: Request, num_tokens: int, *_: Any, **__: Any) -> None:
        """Queue to the log the pages that the window block holds after ``num_tokens`` tokens."""
        unit = self._spec.page_tokens
        window_start = max(0, num_tokens - self._spec.window)
        first = max(self.num_cached_block.get(request.request_id, 0), -(-window_start // unit))
        end = num_tokens // unit
        if first >= end:
            return
        self.num_cached_block[request.request_id] = end
        (block,) = self.req_to_blocks[request.request_id]
        for page in range(first, end):
            target = self.log.add(request.block_hashes[page])
            if target is not None:
                report_stored(self.block_pool, request, page, page + 1, self.kv_cache_group_id)
                slot = page * unit - window_start
                self._transfers.stores.append(
                    WindowStore(self.kv_cache_group_id, block.block_id, slot, target)
                )

    def refill(self, request: Request, first: int, end: int) -> list[int]:
        """Return the log's pages for the pages ``first`` to ``end`` of a request, new if missing.

        The caller fills them.
        """
        for page in range(first, end):
            if self.log.find([request.block_hashes[page]]) is None:
                report_stored(self.block_pool, request, page, page + 1, self.kv_cache_group_id)
        return [self.log.refill(block_hash) for block_hash in request.block_hashes[first:end]]

    def _report_evicted(self, block_hash: bytes) -> None:
        name = make_block_hash_with_group_id(BlockHash(block_hash), self.kv_cache_group_id)
        self.block_pool._emit_block_removed_events([name])

    @classmethod
    def find_longest_cache_hit(
        cls, *_: Any, **__: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        raise NotImplementedError("RblnKvCoordinator looks window groups up in their logs")

    def remove_skipped_blocks(self, *_: Any, **__: Any) -> None:
        """Do nothing: a window block slides in place and is freed with its request."""

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0


def register_specs() -> None:
    """Register our specs and their managers with vLLM; idempotent."""
    KVCacheSpecRegistry.register(PagedSpec, PagedManager, PagedSpec)
    KVCacheSpecRegistry.register(WindowSpec, WindowManager, WindowSpec)
    KVCacheSpecRegistry.register(AppendedWindowSpec, AppendedWindowManager, AppendedWindowSpec)
