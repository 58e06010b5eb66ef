"""Which kind of KV cache each layer gets, and what it costs."""

import dataclasses
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from rbln_backend.devices.emulated.memory import HostKvMemory
from rbln_backend.errors import ConfigError, DeviceMemoryError, UnsupportedModelError
from rbln_backend.kv_cache.layout import (
    explicit_budget_bytes,
    kv_budget_bytes,
    kv_cache_shape,
    log_pages,
    page_span,
    reuse_unit,
)
from rbln_backend.kv_cache.managers import WindowLog
from rbln_backend.kv_cache.plan import (
    KvLimits,
    get_reuse_unit,
    paged_bytes_per_block,
    plan_specs,
    window_bytes,
)
from rbln_backend.kv_cache.specs import PagedSpec, WindowSpec, get_parts
from rbln_backend.kv_cache.tensors import KvCaches

HEADS = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
TOKEN_BYTES = 2 * 2 * 32 * 2
_SIZES = {"max_model_len": 1000, "max_num_seqs": 4, "chunk_tokens": 64, "block_size": 32}
_LOG = {"unit": 16, "log_bytes": 1 << 30, "log_tokens": None}
LIMITS = KvLimits(**_SIZES, **_LOG, hybrid=True)


def full() -> KVCacheSpec:
    return FullAttentionSpec(block_size=32, **HEADS)


def window(size: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=32, sliding_window=size, **HEADS)


def plan(layers: dict[str, KVCacheSpec], **limits: object) -> dict[str, PagedSpec | WindowSpec]:
    return plan_specs(layers, dataclasses.replace(LIMITS, **limits))


def test_a_hybrid_has_both_kinds() -> None:
    specs = plan({"a": full(), "b": window(48)})
    assert isinstance(specs["a"], PagedSpec)
    assert specs["a"].block_size == 32
    local = specs["b"]
    assert isinstance(local, WindowSpec)
    # One block for each request and the null block; four windows per request and the null page.
    assert (local.window, local.own_blocks, local.log_pages) == (48, 5, 4 * 4 * 48 // 16 + 1)
    assert paged_bytes_per_block(specs.values()) == 32 * TOKEN_BYTES
    held = 5 * 48 + (4 * 4 * 48 + 16)
    assert window_bytes(specs.values(), 4) == held * TOKEN_BYTES
    # A shared cache does not slide, and a window of the whole context is paged.
    specs = plan_specs({"a": window(48), "b": window(48)}, LIMITS, {"b"})
    specs |= plan({"c": window(1000)}) | plan({"d": window(999)})
    kinds = {"a": WindowSpec, "b": PagedSpec, "c": PagedSpec, "d": WindowSpec}
    assert {name: type(spec) for name, spec in specs.items()} == kinds


def test_a_compressed_cache_holds_values_within_keys() -> None:
    (spec,) = plan({"a": MLAAttentionSpec(block_size=32, **HEADS)}).values()
    assert isinstance(spec, PagedSpec)
    assert get_parts(spec) == 1
    assert paged_bytes_per_block([spec]) == 32 * TOKEN_BYTES // 2


def chunked(size: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=size, **HEADS)


def test_a_chunked_layer_keeps_its_whole_context() -> None:
    specs = plan({"a": full(), "b": chunked(400)})
    assert specs["a"] == specs["b"]
    # Below a chunk any op will do.
    assert plan({"b": chunked(1000)}, own_ops=False) == {"b": specs["b"]}
    with pytest.raises(UnsupportedModelError, match="layer b: chunked local attention"):
        plan({"b": chunked(999)}, own_ops=False)


def test_narrow_values_use_rows_of_the_size_of_keys() -> None:
    narrow = dataclasses.replace(full(), head_size_v=16)
    assert plan({"a": narrow}) == plan({"a": full()})
    with pytest.raises(UnsupportedModelError, match="heads of 32 and 16"):
        plan({"a": narrow}, own_ops=False)


def test_windows_alone_use_vllms_pool() -> None:
    (spec,) = plan({"a": window(48)}).values()
    assert isinstance(spec, WindowSpec)
    assert (spec.own_blocks, spec.prefix_cacheable) == (0, True)
    (spec,) = plan({"a": window(48)}, log_bytes=0).values()
    assert isinstance(spec, WindowSpec)
    assert spec.log_pages == 0


@pytest.mark.parametrize(
    ("windows", "unit", "chunk", "expected"),
    [
        ([48], 16, 64, 16),
        ([24], 16, 64, 8),
        ([24, 100], 16, 64, 4),
        ([25], 16, 64, 16),
        ([24], 64, 64, 64),
    ],
)
def test_pages_fill_the_windows(windows: list[int], unit: int, chunk: int, expected: int) -> None:
    specs = plan(
        {str(size): window(size) for size in windows} | {"full": full()},
        unit=unit,
        chunk_tokens=chunk,
    )
    assert get_reuse_unit(specs.values(), 99) == expected
    assert {s.page_tokens for s in specs.values() if isinstance(s, WindowSpec)} == {expected}
    assert get_reuse_unit([specs["full"]], 99) == 99


def test_windows_need_the_hybrid_manager() -> None:
    with pytest.raises(ConfigError, match="drop --disable-hybrid-kv-cache-manager"):
        plan({"a": window(48), "b": full()}, hybrid=False)
    assert isinstance(plan({"b": full()}, hybrid=False)["b"], PagedSpec)


def test_other_kinds_are_rejected_by_layer() -> None:
    sliding = SlidingWindowMLASpec(block_size=32, sliding_window=64, **HEADS)
    with pytest.raises(UnsupportedModelError, match=r"layers\.3"):
        plan({"layers.3": sliding})


def test_drafts_keep_windows_in_pages_and_nothing_that_is_shifted() -> None:
    layers = {"a": full(), "b": window(48)}
    assert plan(layers, checks_drafts=True)["b"] == plan({"b": full()})["b"]
    (in_pages,) = plan({"b": window(48)}, checks_drafts=True, appends_windows=True).values()
    assert isinstance(in_pages, SlidingWindowSpec)
    with pytest.raises(UnsupportedModelError, match="layer b with a window of 48: speculative"):
        plan(layers, checks_drafts=True, own_ops=False)


# ------------------------------------------------------------------------------------------- layout
GIB = 1 << 30


def test_shape_is_the_documented_layout() -> None:
    assert kv_cache_shape(10, 4, 128, 64) == (10, 2, 4, 1, 128, 64)


def budget(**overrides: int | float) -> int:
    facts = {"total_bytes": 16 * GIB, "available_bytes": 12 * GIB, "utilization": 0.9}
    facts |= {"used_bytes": GIB, "bytes_per_block": 1 << 20, "blocks_per_request": 16}
    return kv_budget_bytes(**facts | {"max_num_seqs": 8} | overrides)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # What requests can use; half of the free memory; a share of the process; without windows.
        ({}, (2 * 8 * 16 + 1) << 20),
        ({"max_num_seqs": 10_000}, 6 * GIB),
        ({"max_num_seqs": 10_000, "utilization": 0.25}, 3 * GIB),
        ({"max_num_seqs": 10_000, "window_bytes": 2 * GIB}, 4 * GIB),
    ],
)
def test_the_budget_has_four_bounds(changes: dict[str, int | float], expected: int) -> None:
    assert budget(**changes) == expected


def test_too_little_memory_names_the_numbers_and_the_flags() -> None:
    with pytest.raises(DeviceMemoryError, match=r"17 MiB.*8 MiB.*--max-model-len"):
        budget(available_bytes=16 << 20)
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
    with pytest.raises(ConfigError, match=r"sub_block_size=24.*64 tokens"):
        reuse_unit(wanted=24, default=16, block_size=64, enabled=True)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, (0, 0)), (16, (0, 2)), (40, (0, 5)), (48, (1, 6)), (80, (5, 10))],
)
def test_page_span_covers_the_window(num_tokens: int, expected: tuple[int, int]) -> None:
    assert page_span(num_tokens, window=40, page_tokens=8) == expected


def pages(**overrides: int | None) -> int:
    facts = {"window": 100, "unit": 16, "max_model_len": 1000, "max_num_seqs": 8}
    facts |= {"chunk_tokens": 64, "max_bytes": GIB, "token_bytes": 1000}
    return log_pages(**facts | {"wanted_tokens": None} | overrides)  # type: ignore[arg-type]


def test_the_log_holds_four_windows_per_request() -> None:
    assert pages() == 2 * 8 * 200 // 16 + 1
    assert pages(max_model_len=150) == 2 * 8 * 150 // 16 + 1
    assert pages(wanted_tokens=1600) == 101


def test_the_log_is_within_its_bytes_but_holds_one_step() -> None:
    assert pages(max_bytes=800_000) == 51
    assert pages(max_bytes=1) == 7 + 8 + 1 + 1
    assert pages(max_bytes=0) == 0


# --------------------------------------------------------------------------------------- window log
UNIT = 4


def prefix_hashes(tokens: str) -> list[bytes]:
    """One hash per page of the text, over everything up to that page's end."""
    return [tokens[:end].encode() for end in range(UNIT, len(tokens) + 1, UNIT)]


def test_a_position_needs_its_whole_window() -> None:
    log = WindowLog(num_pages=10, page_tokens=UNIT, window=10)
    hashes = prefix_hashes("abcdefghijklmnopqrst")
    for block_hash in (*hashes[:2], hashes[4]):
        log.add(block_hash)
    assert log.longest(hashes, 20) == 8, "the window of 20 reaches back to position 10"
    log.add(hashes[2])
    log.add(hashes[3])
    assert log.longest(hashes, 20) == 20
    assert log.longest(hashes, 19) == 16
    assert log.longest(hashes, 3) == 0
    assert len(log.use(hashes, 20)) == 3, "positions 10 to 19 lie in pages 2 to 4"
    assert log.longest(prefix_hashes("abcdXXXXijklmnopqrst"), 20) == 4, "the prefix counts"


def test_the_least_recently_used_page_goes_first() -> None:
    log = WindowLog(num_pages=2, page_tokens=UNIT, window=UNIT)
    first, second, third = prefix_hashes("abcdefghijkl")
    page = log.add(first)
    log.add(second)
    assert log.add(first) is None, "known: refreshed, not logged twice"
    assert log.add(third) != page
    assert log.longest([first], UNIT) == UNIT
    assert log.longest([second], UNIT) == 0
    log.use([first], UNIT)
    log.add(second)
    assert log.longest([first], UNIT) == UNIT


def test_clear_returns_every_page() -> None:
    log = WindowLog(num_pages=3, page_tokens=UNIT, window=UNIT)
    for block_hash in prefix_hashes("abcdefgh"):
        log.add(block_hash)
    log.clear()
    assert log.num_used == 0
    assert sorted(log.add(h) or 0 for h in prefix_hashes("abcdefghijkl")) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_longest_equals_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([1, 3, 4, 7, 8, 13, 40])
    log = WindowLog(num_pages=rng.randrange(2, 30), page_tokens=UNIT, window=window)
    texts = ["".join(rng.choice("ab") for _ in range(60)) for _ in range(3)]
    pages: dict[bytes, int] = {}
    for _ in range(60):
        hashes = prefix_hashes(rng.choice(texts))
        block_hash = rng.choice(hashes)
        page = log.add(block_hash)
        if page is not None:
            pages = {h: p for h, p in pages.items() if p != page} | {block_hash: page}
        limit = rng.randrange(61)
        resumable = [
            end
            for end in range(UNIT, limit + 1, UNIT)
            if all(hashes[p] in pages for p in range(max(0, end - window) // UNIT, end // UNIT))
        ]
        found = log.longest(hashes, limit)
        assert found == max(resumable, default=0)
        first = max(0, found - window) // UNIT
        expected = [pages[h] for h in hashes[first : found // UNIT]]
        assert log.use(hashes, found) == expected
        assert log.num_used == len(pages) <= log.num_pages


# ---------------------------------------------------------------------------------------------- fp8
def layer(k_scale: float, v_scale: float, owner: str | None = None) -> Any:
    return SimpleNamespace(
        kv_cache=None,
        kv_cache_dtype="fp8",
        kv_sharing_target_layer_name=owner,
        _k_scale=torch.tensor(k_scale),
        _v_scale=torch.tensor(v_scale),
    )


def test_a_shared_cache_is_read_by_its_owners_scales(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {name: torch.zeros(2, dtype=torch.float8_e4m3fn) for name in ("plain", "owner")}
    layers = {
        "plain": layer(1.0, 1.0),
        "owner": layer(0.5, 0.25),
        "reader": layer(1.0, 1.0, owner="owner"),
    }
    with caplog.at_level(logging.INFO):
        KvCaches(HostKvMemory(), tensors, [], {}).bind(layers)
    assert layers["reader"].kv_cache is tensors["owner"]
    # The same tensors: a graph knows them by their identity.
    assert layers["reader"]._k_scale is layers["owner"]._k_scale
    assert layers["reader"]._v_scale is layers["owner"]._v_scale
    assert float(layers["plain"]._k_scale) == 1.0
    assert "2 of 3 layers have scales from the checkpoint" in caplog.text
