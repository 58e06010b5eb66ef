"""Sizes of steps that check drafts."""

from __future__ import annotations

import pytest

from rbln_backend.buckets import NO_DRAFTS, BucketTable, VerifyTable
from rbln_backend.errors import BucketError

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
