"""Advice names what to set, and keeps quiet where nothing is known or gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rbln_backend.usage import LEAST_STEPS, NOISE, Usage, about_engine, advise


def usage(
    steps: Mapping[tuple[int, int], tuple[int, float]], buckets: Sequence[int] = (8,)
) -> Usage:
    """Decode steps by size and bucket: how many ran, and the seconds of one."""
    told = Usage(about=about_engine("m", "cpu", decode_buckets=buckets, prefill_buckets=(2048,)))
    for (size, bucket), (count, seconds) in steps.items():
        told.phases["decode"].note(size, bucket, count * seconds, count)
    return told


def decode(
    steps: Mapping[tuple[int, int], tuple[int, float]], buckets: Sequence[int] = (8,)
) -> dict[str, Any]:
    told: dict[str, Any] = advise(usage(steps, buckets))["decode"]
    return told


def test_it_names_sizes_saving_and_setting() -> None:
    # A smaller bucket was measured at less than half the time.
    told = usage({(1, 8): (60, 0.01), (5, 8): (20, 0.01), (1, 1): (LEAST_STEPS, 0.004)})
    advice = advise(told)
    assert advice["prefill"] is None
    decode = advice["decode"]
    assert decode["current"] == [8]
    assert decode["suggested"] == [1, 5, 8]
    assert 0.3 < decode["saving"] < 0.6
    assert decode["padding_then"] == 0.0
    assert decode["padding_now"] > 0.6
    assert decode["noise"] == NOISE
    assert '"decode_batch_bucket_manual_buckets": [1, 5, 8]' in decode["setting"]


def test_a_bucket_that_hardly_ran_says_nothing_of_its_time() -> None:
    steps = {(1, 8): (60, 0.01), (5, 8): (20, 0.01)}
    assert decode({**steps, (1, 1): (LEAST_STEPS - 1, 0.004)})["suggested"] == [8]
    assert decode(steps)["suggested"] == [8], "one bucket says nothing of smaller ones"


def test_a_bucket_that_most_steps_use_stays_however_its_times_wander() -> None:
    """79 % of the steps ran in bucket 1, a little slower than 2 in a loaded hour."""
    steps = {(1, 1): (790, 0.0021), (2, 2): (100, 0.0020), (3, 4): (110, 0.0030)}
    told = decode(steps, (1, 2, 4))
    assert told["suggested"] == told["current"] == [1, 2, 4]
    assert told["saving"] == 0.0
    # Also where something else is worth a change.
    told = decode({**steps, (20, 32): (900, 0.0300)}, (1, 2, 4, 32))
    assert {1, 2, 20, 32} <= {*told["suggested"]}
    assert told["saving"] > told["noise"]


def test_a_gain_within_the_noise_is_no_advice() -> None:
    few, many = 40, 400
    for count, wanted in ((few, [1, 8]), (many, [1, 5, 8])):
        steps = {(1, 1): (1000, 0.004), (8, 8): (1000, 0.010), (5, 8): (count, 0.010)}
        assert decode(steps, (1, 8))["suggested"] == wanted


def test_times_that_do_not_explain_what_ran_are_noise() -> None:
    """The smaller bucket took three times as long: two kinds of load, not two kinds of bucket."""
    calm = {(1, 1): (500, 0.010), (3, 4): (500, 0.030), (20, 32): (500, 0.060)}
    assert decode(calm, (1, 4, 32))["suggested"] != [1, 4, 32]
    mixed = {(1, 1): (500, 0.030), (3, 4): (500, 0.010), (20, 32): (500, 0.060)}
    told = decode(mixed, (1, 4, 32))
    assert told["noise"] == 0.2
    assert told["suggested"] == [1, 4, 32]


def test_sizes_that_the_engine_no_longer_takes_are_left_out() -> None:
    assert advise(usage({(12, 12): (5, 0.01)}))["decode"] is None
    assert decode({(12, 12): (5, 0.01), (2, 8): (1, 0.01)})["steps"] == 1


def test_many_sizes_are_taken_as_they_are() -> None:
    told = usage({})
    for size in range(1, 2049):
        told.phases["prefill"].note(size, 2048, 0.1)
    told.phases["prefill"].note(1, 16, 0.01 * LEAST_STEPS, LEAST_STEPS)
    prefill = advise(told)["prefill"]
    assert len(prefill["suggested"]) == 6
    assert prefill["padding_then"] < prefill["padding_now"]


def test_nothing_is_said_of_an_unknown_engine() -> None:
    assert advise(Usage()) == {"prefill": None, "decode": None}
