"""KV cache events of single reuse units, in vLLM's event classes."""

from __future__ import annotations

import msgspec

from rbln_backend.vllm_compat.surface import (
    BlockPool,
    BlockStored,
    Request,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
)


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


def units_of(event: BlockStored, first: int, end: int) -> BlockStored:
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
