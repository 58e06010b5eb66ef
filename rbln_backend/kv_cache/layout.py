"""Block and byte arithmetic of the KV cache (pure)."""

from __future__ import annotations

from rbln_backend.errors import DeviceMemoryError

MIB = 1 << 20


def num_partitions(max_model_len: int, block_size: int) -> int:
    """Blocks of a longest request: the width P of a block table."""
    return -(-max_model_len // block_size)


def kv_cache_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_size: int
) -> tuple[int, int, int, int, int, int]:
    """[num_blocks, 2 (K, V), Hkv, 1 (group), block_size, D], the RBLN layout since 0.12."""
    return (num_blocks, 2, num_kv_heads, 1, block_size, head_size)


def kv_budget_bytes(
    *,
    total_bytes: int,
    available_bytes: int,
    utilization: float,
    used_bytes: int,
    bytes_per_block: int,
    blocks_per_request: int,
    max_num_seqs: int,
) -> int:
    """Bytes to give the KV cache when the user named no size.

    The budget is ``utilization`` of the device less what is used already, at most half of what is
    free now (a host's memory is shared), and no more than twice what ``max_num_seqs`` longest
    requests can hold: the second half keeps reusable prefixes. Raises ``DeviceMemoryError`` when
    one longest request does not fit.
    """
    wanted = 2 * max_num_seqs * blocks_per_request * bytes_per_block + bytes_per_block
    budget = min(int(total_bytes * utilization) - used_bytes, available_bytes // 2, wanted)
    # Block 0 is vLLM's null block and holds no request.
    needed = (blocks_per_request + 1) * bytes_per_block
    if budget < needed:
        raise DeviceMemoryError(
            f"KV cache: one longest request needs {needed // MIB} MiB, but the budget is "
            f"{max(budget, 0) // MIB} MiB ({utilization:.2f} of {total_bytes // MIB} MiB, "
            f"{used_bytes // MIB} MiB used by the process, {available_bytes // MIB} MiB free). "
            "Reduce --max-model-len, or set --kv-cache-memory-bytes."
        )
    return budget
