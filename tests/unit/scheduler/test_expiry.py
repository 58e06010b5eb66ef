"""Which requests have waited too long, by the order in which they came."""

from __future__ import annotations

from rbln_backend.scheduler.scheduler import QueueExpiry


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def test_requests_are_named_once_when_their_time_is_over() -> None:
    clock = Clock()
    expiry = QueueExpiry(2.0, clock)
    expiry.add("a", waited_s=0.0)
    clock.now += 1.5
    expiry.add("b", waited_s=0.5)
    assert list(expiry.take_due()) == []
    clock.now = 12.0
    assert list(expiry.take_due()) == ["a"]
    clock.now = 12.9
    assert list(expiry.take_due()) == []
    clock.now = 13.0
    assert list(expiry.take_due()) == ["b"]
    assert list(expiry.take_due()) == []


def test_another_clock_that_jumped_does_no_harm() -> None:
    clock = Clock()
    expiry = QueueExpiry(2.0, clock)
    expiry.add("future", waited_s=-3600.0)
    clock.now += 1.9
    assert list(expiry.take_due()) == []
    clock.now += 0.2
    assert list(expiry.take_due()) == ["future"]
    expiry.add("past", waited_s=3600.0)
    assert list(expiry.take_due()) == ["past"]


def test_without_a_limit_nothing_is_kept() -> None:
    expiry = QueueExpiry(0.0)
    expiry.add("a", waited_s=1e9)
    assert list(expiry.take_due()) == []
