"""Bucket tables follow the documented strategies, and look-ups round up to the next bucket."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.buckets import (
    NO_DRAFTS,
    BucketTable,
    ChunkPlan,
    VerifyTable,
    decode_bucket_table,
    get_padded_size,
    get_prompts,
    get_step_tokens,
    prefill_chunk_table,
)
from rbln_backend.config import RblnConfig
from rbln_backend.errors import BucketError
from rbln_backend.usage import PhaseUsage, Usage, UsageFile, about_engine


@pytest.mark.parametrize(
    ("options", "maximum", "buckets"),
    [
        ({"min": 2, "limit": 8}, 8, (2, 4, 8)),
        ({"min": 2, "limit": 8}, 64, (2, 4, 8, 16, 32, 64)),
        ({"min": 1, "limit": 8}, 8, (1, 2, 4, 8)),
        ({"min": 2, "limit": 4}, 32, (4, 8, 16, 32)),
        ({"strategy": "linear", "min": 2, "step": 4, "limit": 32}, 16, (4, 8, 12, 16)),
        ({"min": 1, "limit": 4}, 8, (1, 2, 4, 8)),
        ({"min": 1, "limit": 1}, 8, (8,)),
        ({"min": 1, "step": 3, "limit": 32}, 100, (1, 3, 11, 33, 100)),
        ({"min": 1, "limit": 32}, 3, (1, 3)),
        ({"min": 1, "limit": 32}, 1, (1,)),
        ({"strategy": "linear", "min": 1, "step": 3, "limit": 32}, 10, (1, 4, 7, 10)),
        ({"strategy": "linear", "min": 4, "step": 1, "limit": 32}, 4, (4,)),
        ({"strategy": "manual", "manual_buckets": (6, 1, 24)}, 24, (1, 6, 24)),
        # Our defaults.
        ({}, 64, (1, 2, 4, 8, 16, 32, 64)),
    ],
)
def test_worked_examples(options: dict[str, Any], maximum: int, buckets: tuple[int, ...]) -> None:
    options = ({"strategy": "exponential", "step": 2} | options) if options else {}
    config = RblnConfig(**{f"decode_batch_bucket_{k}": v for k, v in options.items()})
    assert decode_bucket_table(config, maximum).sizes == buckets


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
        *(
            ({"strategy": "manual", "manual_buckets": (1, last)}, f"bucket {last} must equal .* 8")
            for last in (4, 16)
        ),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config = RblnConfig(**{f"decode_batch_bucket_{k}": v for k, v in options.items()})
        decode_bucket_table(config, 8)


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


def test_the_last_chunk_must_be_the_maximum_and_hold_a_token() -> None:
    config = RblnConfig(prefill_chunk_buckets=(20, 100))
    with pytest.raises(BucketError, match="must equal max_num_batched_tokens 128"):
        prefill_chunk_table(config, 128)
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
    options = {"strategy": strategy, "min": min(smallest, maximum), "step": step, "limit": limit}
    config = RblnConfig(**{f"decode_batch_bucket_{k}": v for k, v in options.items()})
    table = decode_bucket_table(config, maximum)
    assert table.largest == maximum
    assert len(table) <= limit
    assert table.sizes[0] >= options["min"]


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(-1, 300))
def test_find_is_the_minimum_over_the_fitting_buckets(sizes: set[int], n: int) -> None:
    table = BucketTable(tuple(sorted(sizes)))
    fitting = [size for size in table if 0 < n <= size]
    if fitting:
        assert table.find(n) == fitting[0]
    else:
        with pytest.raises(BucketError, match=f"No batch bucket found for batch size {n}"):
            table.find(n)


# --------------------------------------------------------------------------------------- chunk plan
HALVES = BucketTable((16, 32, 64, 128, 256))


def chunks(plan: ChunkPlan, tokens: int) -> list[int]:
    """The lengths of a prompt's chunks; a last single token is decoded."""
    lengths = []
    while tokens > 1:
        lengths.append(plan.next_chunk(tokens))
        tokens -= lengths[-1]
    return lengths


@pytest.mark.parametrize(
    ("tokens", "step_tokens", "lengths"),
    [
        (2, 16, [2]),
        (16, 16, [16]),
        (128, 16, [128]),
        (129, 16, [128]),
        (130, 16, [128, 2]),
        (72, 16, [64, 8]),
        # 32 + 16 and a second step cost as much as 64: fewer steps win.
        (40, 16, [40]),
        (40, 0, [32, 8]),
        (200, 16, [128, 64, 8]),
        (250, 16, [250]),
        (130, 1000, [130]),
        (600, 16, [256, 256, 64, 24]),
    ],
)
def test_chunk_plan_worked_examples(tokens: int, step_tokens: int, lengths: list[int]) -> None:
    assert chunks(ChunkPlan(HALVES, step_tokens), tokens) == lengths


@given(
    sizes=st.sets(st.integers(1, 60), min_size=1),
    step_tokens=st.integers(0, 40),
    tokens=st.integers(1, 200),
)
def test_a_plan_ends_fits_and_never_costs_more_than_one_chunk(
    sizes: set[int], step_tokens: int, tokens: int
) -> None:
    table = BucketTable(tuple(sorted(sizes)))
    plan = ChunkPlan(table, step_tokens)
    lengths = chunks(plan, tokens)
    assert tokens - sum(lengths) in (0, 1)
    assert all(1 <= length <= table.largest for length in lengths)
    if 1 < tokens <= table.largest:
        cost = sum(table.find(length) + step_tokens for length in lengths)
        assert cost <= table.find(tokens) + step_tokens


def test_one_chunk_size_is_never_cut() -> None:
    plan = ChunkPlan(BucketTable((64,)), 0)
    assert [plan.next_chunk(left) for left in (1, 2, 63, 64, 65, 500)] == [1, 2, 63, 64, 64, 64]
    with pytest.raises(BucketError, match="-1"):
        ChunkPlan(HALVES, -1)


@pytest.mark.parametrize(
    ("left", "count"),
    [
        ([32] * 8, 8),
        # Seven fill 252 of 256; the eighth would need a chunk of its own.
        ([36] * 8, 7),
        # Six in a chunk of 128 save more than eight in one of 256.
        ([20] * 8, 6),
        # One chunk and step in place of three, and of four.
        ([130, 120], 2),
        ([200, 30], 2),
        ([300, 10], 1),
        ([10, 300], 1),
        # Eight prompts take a chunk of 128, however short they are.
        ([5] * 12, 8),
        ([1, 1], 1),
        ([40], 1),
        ([], 1),
    ],
)
def test_prompts_share_a_chunk_where_that_computes_less(left: list[int], count: int) -> None:
    assert ChunkPlan(HALVES, 16, prompts=8).together(left) == count
    assert ChunkPlan(HALVES, 16).together(left) == 1


@pytest.mark.parametrize(
    ("experts", "chosen", "step_tokens"),
    [(32, 4, 128), (8, 3, 32), (0, 0, 16), (1, 1, 16), (0, 2, 16), (8, 0, 16)],
)
def test_a_step_costs_more_tokens_the_fewer_experts_a_token_chooses(
    experts: int, chosen: int, step_tokens: int
) -> None:
    assert get_step_tokens(experts, chosen) == step_tokens


def test_a_mixture_is_cut_less_and_shares_more() -> None:
    dense, mixture = (
        ChunkPlan(HALVES, get_step_tokens(experts, 4), prompts=8) for experts in (0, 32)
    )
    assert [chunks(dense, tokens) for tokens in (72, 150)] == [[64, 8], [128, 22]]
    assert [chunks(mixture, tokens) for tokens in (72, 150)] == [[72], [150]]
    assert (dense.together([32] * 5), mixture.together([32] * 5)) == (4, 5)


@given(
    left=st.lists(st.integers(1, 300), max_size=12),
    step_tokens=st.integers(0, 40),
    most=st.integers(1, 12),
)
def test_prompts_that_share_a_chunk_fit_into_its_graph(
    left: list[int], step_tokens: int, most: int
) -> None:
    count = ChunkPlan(HALVES, step_tokens, most).together(left)
    if count > 1:
        assert count <= get_prompts(HALVES.find(get_padded_size(sum(left[:count]), count)), most)


# -------------------------------------------------------------------------------------------- usage
def counted(size: int, bucket: int, steps: int = 1) -> Usage:
    usage = Usage()
    for _ in range(steps):
        usage.phases["decode"].note(size, bucket, 0.5)
    return usage


def test_it_adds_up_over_restarts(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "sub" / "model.json")
    assert file.read() == Usage()
    file.add(counted(3, 4, steps=2))
    UsageFile(file.path).add(counted(1, 1))
    decode = file.read().phases["decode"]
    assert decode == PhaseUsage({3: 2, 1: 1}, {4: 2, 1: 1}, {4: 1.0, 1: 0.5})
    assert decode.mean_seconds() == {4: 0.5, 1: 0.5}
    assert file.read().phases["prefill"] == PhaseUsage()


def test_it_says_what_it_is_about(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "model.json")
    for buckets in ((1, 4), (1, 2, 4)):
        usage = counted(1, 1)
        usage.about = about_engine("m", "cpu", decode_buckets=buckets, prefill_buckets=(16,))
        file.add(usage)
    file.add(counted(1, 1))
    assert file.read().about["decode_buckets"] == [1, 2, 4]
    assert file.read().steps == 3


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: UsageFile(path).add(counted(2, 2)), range(64)))
    assert UsageFile(path).read().phases["decode"].steps_by_size == {2: 64}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.json", "model.lock"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"format": 9}),
        '{"format": 1, "decode": 3}',
        '{"format": 1, "about": {"x": ' + "[" * 100_000,
    ],
)
def test_a_damaged_file_is_set_aside(tmp_path: Path, text: str) -> None:
    file = UsageFile(tmp_path / "model.json")
    file.path.write_text(text)
    with pytest.raises(ValueError):
        file.read()
    file.add(counted(2, 2))
    assert file.read() == counted(2, 2)
    assert (tmp_path / "model.damaged").read_text() == text


# ------------------------------------------------------------------------------------------- verify
TABLE = VerifyTable(BucketTable((1, 4, 8)), (8, 2, 4), 16)


def test_a_step_has_so_many_tokens_at_most() -> None:
    assert list(TABLE) == [(1, 2), (1, 4), (1, 8), (4, 2), (4, 4), (8, 2)]
    assert TABLE.sizes(3) == ((4, 1), (4, 2), (4, 4))
    assert TABLE.longest(5, 100) == 2
    assert TABLE.sizes(9) == NO_DRAFTS.sizes(1) == ()


def test_a_step_takes_no_more_tokens_than_there_is_room_for() -> None:
    assert [TABLE.longest(1, room) for room in (100, 8, 7, 3, 1, 0)] == [8, 8, 4, 2, 1, 1]


def test_the_smallest_size_is_found() -> None:
    assert [TABLE.find(2, n) for n in (1, 2, 3)] == [(4, 1), (4, 2), (4, 4)]
    with pytest.raises(BucketError, match="No step checks 5 tokens of each of 2 requests"):
        TABLE.find(2, 5)
    with pytest.raises(BucketError, match="of 9 requests"):
        TABLE.find(9, 1)
