"""Which kind of KV cache each layer gets, and what it costs."""

from __future__ import annotations

import dataclasses

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

from rbln_backend.errors import ConfigError, UnsupportedModelError
from rbln_backend.kv_cache.plan import (
    KvLimits,
    paged_bytes_per_block,
    plan_specs,
    reuse_unit_of,
    window_bytes,
)
from rbln_backend.kv_cache.specs import PagedSpec, WindowSpec, parts_of

HEADS = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
TOKEN_BYTES = 2 * 2 * 32 * 2
LIMITS = KvLimits(
    max_model_len=1000,
    max_num_seqs=4,
    chunk_tokens=64,
    block_size=32,
    unit=16,
    log_bytes=1 << 30,
    log_tokens=None,
    hybrid=True,
)


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


def test_a_compressed_cache_holds_values_within_keys() -> None:
    (spec,) = plan({"a": MLAAttentionSpec(block_size=32, **HEADS)}).values()
    assert isinstance(spec, PagedSpec)
    assert parts_of(spec) == 1
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


def test_a_shared_cache_does_not_slide() -> None:
    layers = {"a": window(48), "b": window(48)}
    specs = plan_specs(layers, LIMITS, {"b"})
    assert isinstance(specs["a"], WindowSpec)
    assert isinstance(specs["b"], PagedSpec)


def test_windows_alone_use_vllms_pool() -> None:
    (spec,) = plan({"a": window(48)}).values()
    assert isinstance(spec, WindowSpec)
    assert spec.own_blocks == 0
    assert spec.prefix_cacheable


def test_a_window_of_the_whole_context_is_paged() -> None:
    assert isinstance(plan({"a": window(1000)})["a"], PagedSpec)
    assert isinstance(plan({"a": window(999)})["a"], WindowSpec)


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
    assert reuse_unit_of(specs.values(), 99) == expected
    assert {s.page_tokens for s in specs.values() if isinstance(s, WindowSpec)} == {expected}


def test_without_windows_the_unit_stays() -> None:
    assert reuse_unit_of(plan({"a": full()}).values(), 99) == 99


def test_disabled_logs_take_no_memory() -> None:
    (spec,) = plan({"a": window(48)}, log_bytes=0).values()
    assert isinstance(spec, WindowSpec)
    assert spec.log_pages == 0


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
