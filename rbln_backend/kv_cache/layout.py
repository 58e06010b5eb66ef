"""Block and byte arithmetic of the KV cache (pure)."""

from __future__ import annotations

import math

from rbln_backend.errors import ConfigError, DeviceMemoryError

MIB = 1 << 20


def num_partitions(max_model_len: int, block_size: int) -> int:
    """Return the blocks of a request of ``max_model_len`` tokens: the width P of a block table."""
    return -(-max_model_len // block_size)


def reuse_unit(*, wanted: int | None, default: int, block_size: int, enabled: bool) -> int:
    """Return the tokens at whose multiples a prefix can be reused; a block if not ``enabled``.

    Raises ``ConfigError`` when the ``wanted`` number does not divide the block.
    """
    if not enabled:
        return block_size
    if wanted is not None and block_size % wanted:
        raise ConfigError(
            f"sub_block_size={wanted} does not divide the KV cache block of {block_size} tokens"
        )
    return wanted or math.gcd(default, block_size)


def page_span(num_tokens: int, window: int, page_tokens: int) -> tuple[int, int]:
    """Return first and end page of the window before ``num_tokens``, a multiple of a page."""
    return max(0, num_tokens - window) // page_tokens, num_tokens // page_tokens


def log_pages(
    *,
    window: int,
    unit: int,
    max_model_len: int,
    max_num_seqs: int,
    chunk_tokens: int,
    max_bytes: int,
    token_bytes: int,
    wanted_tokens: int | None,
) -> int:
    """Return the pages of a window group's prefix log, null page included; 0: no log.

    A page has ``unit`` tokens. The default is two windows for twice ``max_num_seqs`` requests,
    within ``max_bytes``, and at least what one step writes and one hit reads.
    """
    if max_bytes == 0:
        return 0
    default = 2 * max_num_seqs * min(max_model_len, 2 * window)
    tokens = wanted_tokens or min(default, max_bytes // token_bytes)
    least = -(-max(window, chunk_tokens) // unit) + max_num_seqs + 1
    return max(tokens // unit, least) + 1


def kv_cache_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, *, parts: int = 2
) -> tuple[int, int, int, int, int, int]:
    """Return [num_blocks, 2 (K, V), Hkv, 1 (group), block_size, D], the RBLN layout since 0.12.

    ``parts`` is 1 where values are cached within keys.
    """
    return (num_blocks, parts, num_kv_heads, 1, block_size, head_size)


def kv_budget_bytes(
    *,
    total_bytes: int,
    available_bytes: int,
    utilization: float,
    used_bytes: int,
    bytes_per_block: int,
    blocks_per_request: int,
    max_num_seqs: int,
    window_bytes: int = 0,
) -> int:
    """Return the bytes of the paged KV cache where the user set no size.

    The budget is ``utilization`` of the device less ``used_bytes`` and ``window_bytes``. It is at
    most half of the free memory (a host's memory is shared), and twice what ``max_num_seqs``
    longest requests hold: the second half keeps reusable prefixes. Raises ``DeviceMemoryError``
    when one longest request does not fit.
    """
    wanted = 2 * max_num_seqs * blocks_per_request * bytes_per_block + bytes_per_block
    free = free_budget_bytes(
        total_bytes=total_bytes,
        available_bytes=available_bytes,
        utilization=utilization,
        used_bytes=used_bytes,
        window_bytes=window_bytes,
    )
    budget = min(free, wanted)
    # Block 0 is vLLM's null block and holds no request.
    needed = (blocks_per_request + 1) * bytes_per_block
    if budget < needed:
        raise DeviceMemoryError(
            f"KV cache: one longest request needs {needed // MIB} MiB, but the budget is "
            f"{max(budget, 0) // MIB} MiB ({utilization:.2f} of {total_bytes // MIB} MiB, "
            f"{used_bytes // MIB} MiB used by the process, {available_bytes // MIB} MiB free, "
            f"{window_bytes // MIB} MiB for window layers). "
            "Reduce --max-model-len or --max-num-seqs, or set --kv-cache-memory-bytes."
        )
    return budget


def free_budget_bytes(
    *,
    total_bytes: int,
    available_bytes: int,
    utilization: float,
    used_bytes: int,
    window_bytes: int,
) -> int:
    """Return the upper bound of the paged KV cache in bytes; may be negative."""
    return min(int(total_bytes * utilization) - used_bytes, available_bytes // 2) - window_bytes


def explicit_budget_bytes(total_bytes: int, bytes_per_block: int, window_bytes: int) -> int:
    """Return the bytes of the user's ``total_bytes`` that are left for the paged KV cache.

    Raises ``DeviceMemoryError`` when window layers leave nothing; vLLM checks the rest.
    """
    budget = total_bytes - window_bytes
    # Block 0 is vLLM's null block and holds no request.
    if budget < 2 * bytes_per_block or budget < 0:
        raise DeviceMemoryError(
            f"KV cache: --kv-cache-memory-bytes gives {total_bytes // MIB} MiB, of which window "
            f"layers need {window_bytes // MIB} MiB; reduce --max-num-seqs or give more"
        )
    return budget
