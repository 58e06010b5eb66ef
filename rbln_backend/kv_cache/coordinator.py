"""Prefix hits across the KV cache groups of a model, at a granularity finer than a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rbln_backend.kv_cache.group_managers import (
    AppendedWindowManager,
    HeadSharingManager,
    PagedManager,
    WindowManager,
)
from rbln_backend.kv_cache.transfers import HeadCopy, WindowTransfers
from rbln_backend.vllm_compat.surface import (
    BlockHash,
    KVCacheBlock,
    KVCacheCoordinator,
    Request,
)

Blocks = tuple[list[KVCacheBlock], ...]


class RblnKvCoordinator(KVCacheCoordinator):
    """vLLM's coordinator with hits that end at any multiple of ``hash_block_size`` tokens.

    A hit ends where every group can resume: paged groups share blocks and copy the head of the
    last one, windows in pages those that the window reaches, and window groups refill a window
    block from their log.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        managers = self.single_type_managers
        self.paged = [m for m in managers if isinstance(m, PagedManager)]
        self.windows = [m for m in managers if isinstance(m, WindowManager)]
        self.appended = [m for m in managers if isinstance(m, AppendedWindowManager)]
        self._enable_caching = bool(options["enable_caching"])
        self._hit_tokens: dict[str, int] = {}
        self._unwritten: set[BlockHash] = set()
        self.on_cached: Callable[[Request, int], None] | None = None
        """Called with a request and its tokens whose KV is in the cache after the step."""

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[Blocks, int, int]:
        """Return blocks (paged) or log pages (window) per group, the hit in tokens, and 0.

        Log pages of the hit become the most recently used ones.
        """
        found, hit = self._find(block_hashes, max_cache_hit_length)
        if hit:
            for window in self.windows:
                pages = window.log.use(block_hashes, hit)
                found[window.kv_cache_group_id] = [KVCacheBlock(page) for page in pages]
        return tuple(found), hit, 0

    def peek_hit(self, block_hashes: list[BlockHash], max_tokens: int) -> int:
        """Return the hit in tokens, at most ``max_tokens``, without touching the eviction order."""
        return self._find(block_hashes, max_tokens)[1]

    def _find(
        self, block_hashes: list[BlockHash], max_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Return the blocks of paged groups by group, and the hit of all groups in tokens."""
        found: list[list[KVCacheBlock]] = [[] for _ in self.single_type_managers]
        if not self._enable_caching:
            return found, 0
        unit = self.block_pool.hash_block_size
        hit = self._written(block_hashes[: max_tokens // unit]) * unit
        for manager in self.paged:
            blocks, length = manager.find_longest_cache_hit(
                block_hashes=block_hashes,
                max_length=hit,
                kv_cache_group_ids=[manager.kv_cache_group_id],
                block_pool=self.block_pool,
                kv_cache_spec=manager.kv_cache_spec,
                drop_eagle_block=False,
                alignment_tokens=unit,
            )
            found[manager.kv_cache_group_id] = blocks[0]
            hit = min(hit, length)
        hit = self._shorten_to_windows(block_hashes, hit)
        for manager in self.paged:
            del found[manager.kv_cache_group_id][-(-hit // manager.block_size) :]
        for appended in self.appended:
            found[appended.kv_cache_group_id] = appended.find(block_hashes, hit)
        return found, hit

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        super().cache_blocks(request, num_computed_tokens)
        if self.on_cached is not None:
            self.on_cached(request, num_computed_tokens)

    def emit_cached_block_events(self, request: Request, computed_blocks: Blocks) -> None:
        """Report nothing: a lookup admits no request, and its last block may be a shared head.

        ``RblnKvCacheManager`` reports the reused blocks of a request when it is admitted.
        """

    def most_blocks(self, num_decoding: int, prompts: Iterable[int]) -> int:
        """Return the most blocks of vLLM's pool that steps could take.

        That is one token of each of ``num_decoding`` running requests, which already own a window
        block, and all tokens of ``prompts``, given as numbers of tokens.
        """
        paged = [m for m in self.single_type_managers if m not in self.windows]
        blocks = num_decoding * len(paged)
        for tokens in prompts:
            blocks += sum(-(-tokens // manager.block_size) for manager in paged)
            blocks += sum(window.get_num_blocks_to_allocate("") for window in self.windows)
        return blocks

    def will_write(self, prefixes: Iterable[BlockHash]) -> None:
        """Exclude prefixes that the step being scheduled computes from hits in the same step.

        Heads of blocks and windows are copied before a step, and logged after it.
        """
        self._unwritten.update(prefixes)

    def _written(self, block_hashes: Sequence[BlockHash]) -> int:
        """Return the number of prefixes before the first that is still to be computed."""
        if not self._unwritten:
            return len(block_hashes)
        found = (n for n, prefix in enumerate(block_hashes) if prefix in self._unwritten)
        return next(found, len(block_hashes))

    def _shorten_to_windows(self, block_hashes: Sequence[BlockHash], hit: int) -> int:
        """Return the longest prefix, up to ``hit`` tokens, that every window group can resume."""
        previous = -1
        while hit != previous:
            previous = hit
            for window in self.windows:
                hit = window.log.longest(block_hashes, hit)
            for appended in self.appended:
                hit = appended.longest(block_hashes, hit)
        return hit

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        super().allocate_new_computed_blocks(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
        if any(new_computed_blocks):
            self._count_hit(num_local_computed_tokens)

    def _count_hit(self, num_tokens: int) -> None:
        in_blocks = (*self.paged, *self.appended)
        if not in_blocks:
            self._add_hit("window", num_tokens)
            return
        in_head = num_tokens % in_blocks[0].block_size
        self._add_hit("sub_block", in_head)
        self._add_hit("block", num_tokens - in_head)

    def take_transfers(self) -> WindowTransfers:
        """Return the window transfers of the step just scheduled, and start collecting anew."""
        self._unwritten.clear()
        transfers = WindowTransfers()
        for window in self.windows:
            taken = window.take_transfers()
            transfers.restores += taken.restores
            transfers.stores += taken.stores
        return transfers

    def take_head_copies(self) -> list[HeadCopy]:
        """Return the copies of the step just scheduled, in the order of upstream's."""
        managers = self.single_type_managers
        sharing = (m for m in managers if isinstance(m, HeadSharingManager))
        return [copy for manager in sharing for copy in manager.take_head_copies()]

    def take_hit_tokens(self) -> dict[str, int]:
        """Return the tokens that prefix hits saved since the last call, by kind of hit.

        Kinds: ``block`` and ``sub_block``, or ``window`` for a model with window layers alone.
        """
        if not (taken := self._hit_tokens):
            return taken
        self._hit_tokens = {}
        return taken

    def _add_hit(self, kind: str, num_tokens: int) -> None:
        if num_tokens:
            self._hit_tokens[kind] = self._hit_tokens.get(kind, 0) + num_tokens

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        for window in self.windows:
            window.log.clear()
        return True
