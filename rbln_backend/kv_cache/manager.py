"""vLLM's KV cache manager, which does nothing for a token that changes no block."""

from __future__ import annotations

from typing import Any

from rbln_backend.kv_cache.coordinator import RblnKvCoordinator
from rbln_backend.vllm_compat.surface import KVCacheBlocks, KVCacheManager, Request

# How vLLM's scheduler asks for a running request.
_RUNNING = {"num_lookahead_tokens": 0}


class RblnKvCacheManager(KVCacheManager):
    """Upstream's manager over our coordinator.

    Most tokens of a running request land in a block that it already has and complete nothing that
    could be registered for prefix hits. Asking every group to find that out is a third of
    upstream's scheduling of a decode batch.
    """

    def __init__(self, upstream: KVCacheManager, coordinator: RblnKvCoordinator) -> None:
        """Take the place of ``upstream``, which holds nothing yet."""
        vars(self).update(vars(upstream))
        self.coordinator = coordinator
        self.block_pool = coordinator.block_pool
        self._unit = coordinator.block_pool.hash_block_size

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *positional: Any, **options: Any
    ) -> KVCacheBlocks | None:
        if (
            num_new_tokens == 1
            and options == _RUNNING
            and not positional
            # Every block and every page begins and ends at a multiple of the unit.
            and 0 < request.num_computed_tokens % self._unit < self._unit - 1
        ):
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *positional, **options)
