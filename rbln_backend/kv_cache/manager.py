"""vLLM's KV cache manager, with a fast path for tokens that change no block."""

from __future__ import annotations

from typing import Any

from rbln_backend.kv_cache.coordinator import RblnKvCoordinator
from rbln_backend.kv_cache.events import BlockEvents
from rbln_backend.vllm_compat.surface import (
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheEvent,
    KVCacheManager,
    KVCacheSpecKind,
    Request,
)

# Options with which vLLM's scheduler allocates for a running request.
_RUNNING = {"num_lookahead_tokens": 0}
_WINDOW_KIND = KVCacheSpecKind.SLIDING_WINDOW.value
# All attributes of vLLM's manager. A new one in another release may refer to its coordinator.
_ATTRIBUTES = frozenset(
    """
    block_pool coordinator empty_kv_cache_blocks enable_caching enable_kv_cache_events
    kv_cache_config kv_cache_event_metadata log_stats mamba_fine_grained_prefix_cache max_model_len
    metrics_collector num_kv_cache_groups prefix_cache_stats retained_hit_group_ids use_eagle
    watermark_blocks
    """.split()
)


class RblnKvCacheManager(KVCacheManager):
    """Upstream's manager over our coordinator.

    Most tokens of a running request go to a block that it owns and complete no prefix that could
    be registered. Querying every group for each of them is a third of upstream's time to schedule
    a decode batch.
    """

    def __init__(self, upstream: KVCacheManager, coordinator: RblnKvCoordinator) -> None:
        """Take over the attributes of ``upstream``, which has allocated no block yet."""
        attributes = vars(upstream)
        unknown = sorted(attributes.keys() ^ _ATTRIBUTES)
        if unknown:
            raise RuntimeError(f"vLLM's KVCacheManager has other attributes than known: {unknown}")
        vars(self).update(attributes)
        self.coordinator = self.ours = coordinator
        self.block_pool = coordinator.block_pool
        self._unit = coordinator.block_pool.hash_block_size
        self._events = BlockEvents(coordinator)
        # Upstream does not know the kind of our window groups.
        known = list(self.kv_cache_event_metadata)
        for window in coordinator.windows:
            known[window.kv_cache_group_id] = (_WINDOW_KIND, window.log.window)
        self.kv_cache_event_metadata = tuple(known)

    def estimate_cached_tokens(self, request: Request) -> int:
        """Return the tokens of a request that others can share: whole units, not whole blocks."""
        return request.num_computed_tokens // self._unit * self._unit if self.enable_caching else 0

    def peek_hit(self, request: Request) -> int:
        """Return the tokens that a prefix hit would save ``request``; changes nothing."""
        if not self.prefix_cache_lookup_enabled(request):
            return 0
        # The last token is always computed, for its logits.
        return self.ours.peek_hit(request.block_hashes, request.num_tokens - 1)

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
        """As upstream, with a ``HeadCopy`` for each copy."""
        copies, retained = super().take_kv_cache_block_copies()
        heads = self.ours.take_head_copies()
        if [head[:2] for head in heads] != copies:
            raise RuntimeError("a group of the KV cache copies blocks of its own")
        return heads, retained

    def take_events(self) -> list[KVCacheEvent]:
        return [*self._events.filter(super().take_events())]

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *positional: Any,
        **options: Any,
    ) -> KVCacheBlocks | None:
        if (
            num_new_tokens == 1
            and options == _RUNNING
            and not (num_new_computed_tokens or positional)
            # Every block and every page begins and ends at a multiple of the unit.
            and 0 < request.num_computed_tokens % self._unit < self._unit - 1
        ):
            return self.empty_kv_cache_blocks
        given = (num_new_tokens, num_new_computed_tokens, *positional)
        allocated = super().allocate_slots(request, *given, **options)
        if allocated is not None:
            start = request.num_computed_tokens + num_new_computed_tokens
            end = start + num_new_tokens
            places = slice(start // self._unit, end // self._unit)
            self.ours.will_write(request.block_hashes[places])
            if num_new_computed_tokens:
                self._events.report_reuse(request, num_new_computed_tokens)
        return allocated
