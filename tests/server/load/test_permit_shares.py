"""Division of permits between keys: a flood leaves room, and nothing exceeds the limit."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from server.admission import PermitShares


def _flood(shares: PermitShares, owner: str, limit: int, taken: int = 0) -> int:
    """Return how many permits `owner` gets one by one."""
    number = 0
    while taken + number < limit and shares.fits(owner, 1, limit):
        shares.add(owner, 1)
        number += 1
    return number


def test_a_flood_leaves_each_other_key_its_part_by_weight() -> None:
    shares = PermitShares(lambda: {"flood": 1, "one": 1, "two": 2})
    assert _flood(shares, "flood", 64) == 64 - 4 - 8
    assert _flood(shares, "one", 64, 52) == 4
    assert _flood(shares, "two", 64, 56) == 8


def test_one_key_and_no_keys_have_all_permits() -> None:
    assert _flood(PermitShares(lambda: {"only": 1}), "only", 40) == 40
    assert _flood(PermitShares(dict), "", 40) == 40


def test_an_unknown_owner_leaves_what_is_kept() -> None:
    shares = PermitShares(lambda: {"one": 1, "two": 1})
    assert _flood(shares, "admin-1", 40) == 30


@settings(max_examples=100, deadline=None)
@given(
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1, 3]), min_size=2),
    limit=st.integers(1, 70),
    moves=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(-3, 5)), max_size=80),
)
def test_a_key_below_its_part_always_fits(
    weights: dict[str, float], limit: int, moves: list[tuple[str, int]]
) -> None:
    shares, held = PermitShares(lambda: weights), Counter[str]()
    for owner, more in moves:
        more = max(more, -held[owner])
        if held.total() + more <= limit and shares.fits(owner, more, limit):
            shares.add(owner, more)
            held[owner] += more
        for key, weight in weights.items():
            part = int(limit * weight / sum(weights.values()) / 4)
            if held[key] < part:
                assert held.total() < limit and shares.fits(key, 1, limit)
