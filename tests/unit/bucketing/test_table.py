"""Bucket tables follow the documented strategies, and look-ups round up to the next bucket."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.buckets import BucketTable, decode_bucket_table, prefill_chunk_table
from rbln_backend.config import RblnConfig
from rbln_backend.errors import BucketError


@pytest.mark.parametrize(
    ("strategy", "maximum", "smallest", "step", "limit", "buckets"),
    [
        ("exponential", 8, 2, 2, 8, (2, 4, 8)),
        ("exponential", 64, 2, 2, 8, (2, 4, 8, 16, 32, 64)),
        ("exponential", 8, 1, 2, 8, (1, 2, 4, 8)),
        ("exponential", 32, 2, 2, 4, (4, 8, 16, 32)),
        ("linear", 16, 2, 4, 32, (4, 8, 12, 16)),
        ("exponential", 8, 1, 2, 4, (1, 2, 4, 8)),
        ("exponential", 8, 1, 2, 1, (8,)),
        ("exponential", 100, 1, 3, 32, (1, 3, 11, 33, 100)),
        ("exponential", 3, 1, 2, 32, (1, 3)),
        ("exponential", 1, 1, 2, 32, (1,)),
        ("linear", 10, 1, 3, 32, (1, 4, 7, 10)),
        ("linear", 4, 4, 1, 32, (4,)),
    ],
)
def test_worked_examples(
    strategy: str, maximum: int, smallest: int, step: int, limit: int, buckets: tuple[int, ...]
) -> None:
    config = RblnConfig(
        decode_batch_bucket_strategy=strategy,
        decode_batch_bucket_min=smallest,
        decode_batch_bucket_step=step,
        decode_batch_bucket_limit=limit,
    )
    assert decode_bucket_table(config, maximum).sizes == buckets


def test_our_defaults_give_every_power_of_two() -> None:
    assert decode_bucket_table(RblnConfig(), 64).sizes == (1, 2, 4, 8, 16, 32, 64)


def test_manual_buckets_are_taken_as_they_are() -> None:
    config = RblnConfig(
        decode_batch_bucket_strategy="manual", decode_batch_bucket_manual_buckets=(6, 1, 24)
    )
    assert decode_bucket_table(config, 24).sizes == (1, 6, 24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min": 9}, "max_batch_size must be >= min_batch_size"),
        ({"limit": 0}, r"limit\n.*greater than 0"),
        ({"step": 0}, r"step\n.*greater than 0"),
        ({"min": 0}, r"min\n.*greater than 0"),
        ({"step": 1}, "For exponential bucketing, step must be greater than 1, step: 1"),
        ({"strategy": "fibonacci"}, r"strategy\n.*'exponential', 'exp', 'linear' or 'manual'"),
        ({"manual_buckets": (0, 8)}, r"manual_buckets\.0\n.*greater than 0"),
        ({"strategy": "manual"}, "at least one decode batch size in the manual buckets"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config = RblnConfig(**{f"decode_batch_bucket_{k}": v for k, v in options.items()})
        decode_bucket_table(config, 8)


@pytest.mark.parametrize("maximum", [4, 16])
def test_the_last_manual_bucket_must_be_the_maximum(maximum: int) -> None:
    config = RblnConfig(
        decode_batch_bucket_strategy="manual", decode_batch_bucket_manual_buckets=(1, 8)
    )
    with pytest.raises(BucketError, match=f"last manual bucket 8 must equal .* {maximum}"):
        decode_bucket_table(config, maximum)


def test_find_rounds_up_to_the_smallest_bucket() -> None:
    table = BucketTable((1, 4, 8))
    assert [table.find(n) for n in range(1, 9)] == [1, 4, 4, 4, 8, 8, 8, 8]
    assert table.largest == 8
    assert list(table) == [1, 4, 8]
    assert len(table) == 3


@pytest.mark.parametrize("n", [9, 0, -1])
def test_a_size_without_bucket_is_refused(n: int) -> None:
    table = BucketTable((1, 4, 8))
    with pytest.raises(BucketError, match=f"No batch bucket found for batch size {n}"):
        table.find(n)


@pytest.mark.parametrize("sizes", [(), (0, 1), (4, 2), (2, 2)])
def test_a_table_must_be_positive_and_ascending(sizes: tuple[int, ...]) -> None:
    with pytest.raises(BucketError):
        BucketTable(sizes)


@pytest.mark.parametrize(
    ("chunk", "sizes"),
    [
        (2048, (64, 128, 256, 512, 1024, 2048)),
        (256, (16, 32, 64, 128, 256)),
        (127, (31, 63, 127)),
        (31, (31,)),
        (1, (1,)),
    ],
)
def test_derived_chunks_are_halves_down_to_sixteen_tokens(
    chunk: int, sizes: tuple[int, ...]
) -> None:
    assert prefill_chunk_table(RblnConfig(), chunk).sizes == sizes


def test_typical_short_prompts_are_a_quarter_padding_at_most() -> None:
    table = prefill_chunk_table(RblnConfig(), 256)
    lengths = range(5, 301)
    chunks = [[256] * (n // 256) + [n % 256] * (n % 256 > 0) for n in lengths]
    computed = sum(table.find(part) for parts in chunks for part in parts)
    assert 1 - sum(lengths) / computed < 0.25


def test_configured_chunks_are_taken_as_they_are() -> None:
    config = RblnConfig(prefill_chunk_buckets=(100, 20))
    assert prefill_chunk_table(config, 100).sizes == (20, 100)


def test_the_last_chunk_must_be_the_maximum() -> None:
    config = RblnConfig(prefill_chunk_buckets=(20, 100))
    with pytest.raises(BucketError, match="must equal max_num_batched_tokens 128"):
        prefill_chunk_table(config, 128)


def test_a_chunk_must_hold_a_token() -> None:
    with pytest.raises(BucketError, match="max_num_batched_tokens must be greater than 0, got 0"):
        prefill_chunk_table(RblnConfig(), 0)


@given(
    strategy=st.sampled_from(["exponential", "linear"]),
    maximum=st.integers(1, 2000),
    smallest=st.integers(1, 40),
    step=st.integers(2, 60),
    limit=st.integers(1, 40),
)
def test_generated_tables_end_at_the_maximum_and_respect_the_bounds(
    strategy: str, maximum: int, smallest: int, step: int, limit: int
) -> None:
    smallest = min(smallest, maximum)
    config = RblnConfig(
        decode_batch_bucket_strategy=strategy,
        decode_batch_bucket_min=smallest,
        decode_batch_bucket_limit=limit,
        decode_batch_bucket_step=step,
    )
    table = decode_bucket_table(config, maximum)
    assert table.largest == maximum
    assert len(table) <= limit
    assert table.sizes[0] >= smallest


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(1, 300))
def test_find_is_the_minimum_over_the_fitting_buckets(sizes: set[int], n: int) -> None:
    table = BucketTable(tuple(sorted(sizes)))
    fitting = list(itertools.dropwhile(lambda size: size < n, table))
    if not fitting:
        with pytest.raises(BucketError):
            table.find(n)
    else:
        assert table.find(n) == fitting[0]
