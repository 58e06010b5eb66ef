"""What a request may say of drafts, as it travels in vLLM's extra arguments."""

import pytest

from rbln_backend.speculation.drafter import EXTRA_ARGS, Wishes


def test_a_request_that_says_nothing_wants_drafts() -> None:
    assert Wishes.of(None) == Wishes.of({}) == Wishes.of({EXTRA_ARGS: None}) == Wishes()


def test_what_is_said_is_read() -> None:
    told = {EXTRA_ARGS: {"off": True, "prediction": [3, 4], "key": "ours"}, "other": 1}

    assert Wishes.of(told) == Wishes(off=True, prediction=(3, 4), key="ours")


@pytest.mark.parametrize("written", ["x", 5, 1.5, [1], [], None])
def test_what_is_no_mapping_says_nothing_of_drafts(written: object) -> None:
    assert Wishes.of({EXTRA_ARGS: written}) == Wishes()
