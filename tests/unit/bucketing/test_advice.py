"""Advice names what to set, and keeps quiet where nothing is known."""

from __future__ import annotations

from rbln_backend.bucketing.tuner import advise
from rbln_backend.bucketing.usage import Usage, about_engine


def usage(sizes: dict[int, int]) -> Usage:
    told = Usage(about=about_engine("m", "cpu", decode_buckets=(8,), prefill_buckets=(64,)))
    for size, steps in sizes.items():
        for _ in range(steps):
            told.phases["decode"].note(size, 8, 0.01)
    return told


def test_it_names_sizes_saving_and_setting() -> None:
    told = usage({1: 6, 5: 2})
    # A smaller bucket was measured once, at half the time.
    told.phases["decode"].note(1, 1, 0.004)
    advice = advise(told)
    assert advice["prefill"] is None
    decode = advice["decode"]
    assert decode["current"] == [8]
    assert decode["suggested"] == [1, 5, 8]
    assert 0.3 < decode["saving"] < 0.6
    assert decode["padding_then"] == 0.0
    assert decode["padding_now"] > 0.7
    assert '"decode_batch_bucket_manual_buckets": [1, 5, 8]' in decode["setting"]


def test_one_measured_bucket_says_nothing_of_smaller_ones() -> None:
    assert advise(usage({1: 6, 5: 2}))["decode"]["suggested"] == [8]


def test_sizes_that_the_engine_no_longer_takes_are_left_out() -> None:
    assert advise(usage({12: 5}))["decode"] is None
    assert advise(usage({12: 5, 2: 1}))["decode"]["steps"] == 1


def test_many_sizes_are_taken_as_they_are() -> None:
    told = Usage(about=about_engine("m", "cpu", decode_buckets=(8,), prefill_buckets=(2048,)))
    for size in range(1, 2049):
        told.phases["prefill"].note(size, 2048, 0.1)
    told.phases["prefill"].note(1, 16, 0.01)
    prefill = advise(told)["prefill"]
    assert len(prefill["suggested"]) == 6
    assert prefill["padding_then"] < prefill["padding_now"]


def test_nothing_is_said_of_an_unknown_engine() -> None:
    assert advise(Usage()) == {"prefill": None, "decode": None}
