"""The prefix log against a plain list of what was added when."""

from __future__ import annotations

import random

import pytest

from rbln_backend.kv_cache.managers import WindowLog

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
    assert log.num_used == 2
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
