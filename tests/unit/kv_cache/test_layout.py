"""Block and byte arithmetic of the KV cache."""

from __future__ import annotations

import pytest

from rbln_backend.errors import ConfigError, DeviceMemoryError
from rbln_backend.kv_cache.layout import (
    explicit_budget_bytes,
    kv_budget_bytes,
    kv_cache_shape,
    log_pages,
    num_partitions,
    page_span,
    reuse_unit,
)

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


def test_the_budget_is_at_most_what_requests_can_use() -> None:
    assert budget() == (2 * 8 * 16 + 1) << 20


def test_at_most_half_of_the_free_memory() -> None:
    assert budget(max_num_seqs=10_000) == 6 * GIB


def test_utilization_bounds_the_whole_process() -> None:
    assert budget(max_num_seqs=10_000, utilization=0.25) == 3 * GIB


def test_too_little_memory_names_the_numbers_and_the_flags() -> None:
    with pytest.raises(DeviceMemoryError, match=r"17 MiB.*8 MiB.*--max-model-len"):
        budget(available_bytes=16 << 20)


def test_window_layers_get_their_bytes_first() -> None:
    assert budget(max_num_seqs=10_000, window_bytes=2 * GIB) == 4 * GIB
    with pytest.raises(DeviceMemoryError, match=r"6144 MiB for window layers"):
        budget(window_bytes=6 * GIB)


def test_an_explicit_budget_includes_the_windows() -> None:
    assert explicit_budget_bytes(3 * GIB, 1 << 20, GIB) == 2 * GIB
    with pytest.raises(DeviceMemoryError, match=r"gives 1024 MiB.*need 1023 MiB"):
        explicit_budget_bytes(GIB, 1 << 20, GIB - (1 << 20))


@pytest.mark.parametrize(
    ("wanted", "default", "enabled", "expected"),
    [(None, 16, True, 16), (None, 48, True, 16), (32, 16, True, 32), (32, 16, False, 64)],
)
def test_reuse_unit_divides_the_block(
    wanted: int | None, default: int, enabled: bool, expected: int
) -> None:
    unit = reuse_unit(wanted=wanted, default=default, block_size=64, enabled=enabled)
    assert unit == expected


def test_a_sub_block_must_divide_the_block() -> None:
    with pytest.raises(ConfigError, match=r"sub_block_size=24.*64 tokens"):
        reuse_unit(wanted=24, default=16, block_size=64, enabled=True)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, (0, 0)), (16, (0, 2)), (40, (0, 5)), (48, (1, 6)), (80, (5, 10))],
)
def test_page_span_covers_the_window(num_tokens: int, expected: tuple[int, int]) -> None:
    assert page_span(num_tokens, window=40, page_tokens=8) == expected


def pages(**overrides: int | None) -> int:
    facts: dict[str, int | None] = {
        "window": 100,
        "unit": 16,
        "max_model_len": 1000,
        "max_num_seqs": 8,
        "chunk_tokens": 64,
        "max_bytes": GIB,
        "token_bytes": 1000,
        "wanted_tokens": None,
    } | overrides
    return log_pages(**facts)  # type: ignore[arg-type]


def test_the_log_holds_four_windows_per_request() -> None:
    assert pages() == 2 * 8 * 200 // 16 + 1
    assert pages(max_model_len=150) == 2 * 8 * 150 // 16 + 1
    assert pages(wanted_tokens=1600) == 101


def test_the_log_is_within_its_bytes_but_holds_one_step() -> None:
    assert pages(max_bytes=800_000) == 51
    assert pages(max_bytes=1) == 7 + 8 + 1 + 1
    assert pages(max_bytes=0) == 0
