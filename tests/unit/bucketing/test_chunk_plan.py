"""Prompts are cut where that computes less, and never otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.buckets import (
    BucketTable,
    ChunkPlan,
    prompts_of,
    room_of,
    step_tokens_of,
)
from rbln_backend.errors import BucketError

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
def test_worked_examples(tokens: int, step_tokens: int, lengths: list[int]) -> None:
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


def test_a_negative_cost_is_refused() -> None:
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
    assert step_tokens_of(experts, chosen) == step_tokens


def test_a_mixture_is_cut_less_and_shares_more() -> None:
    dense, mixture = (
        ChunkPlan(HALVES, step_tokens_of(experts, 4), prompts=8) for experts in (0, 32)
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
        assert count <= prompts_of(HALVES.find(room_of(sum(left[:count]), count)), most)
