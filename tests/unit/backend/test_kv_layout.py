"""Block and byte arithmetic of the KV cache."""

from __future__ import annotations

import pytest

from rbln_backend.errors import DeviceMemoryError
from rbln_backend.kv_cache.layout import kv_budget_bytes, kv_cache_shape, num_partitions

GIB = 1 << 30


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "expected"), [(256, 64, 4), (257, 64, 5), (64, 64, 1)]
)
def test_num_partitions(max_model_len: int, block_size: int, expected: int) -> None:
    assert num_partitions(max_model_len, block_size) == expected


def test_shape_is_the_documented_layout() -> None:
    assert kv_cache_shape(10, 4, 128, 64) == (10, 2, 4, 1, 128, 64)


def budget(**overrides: int | float) -> int:
    facts = {
        "total_bytes": 16 * GIB,
        "available_bytes": 12 * GIB,
        "utilization": 0.9,
        "used_bytes": GIB,
        "bytes_per_block": 1 << 20,
        "blocks_per_request": 16,
        "max_num_seqs": 8,
    } | overrides
    return kv_budget_bytes(**facts)  # type: ignore[arg-type]


def test_no_more_than_can_ever_be_used() -> None:
    assert budget() == (2 * 8 * 16 + 1) << 20


def test_at_most_half_of_the_free_memory() -> None:
    assert budget(max_num_seqs=10_000) == 6 * GIB


def test_utilization_bounds_the_whole_process() -> None:
    assert budget(max_num_seqs=10_000, utilization=0.25) == 3 * GIB


def test_too_little_memory_names_the_numbers_and_the_knobs() -> None:
    with pytest.raises(DeviceMemoryError, match=r"17 MiB.*8 MiB.*--max-model-len"):
        budget(available_bytes=16 << 20)
