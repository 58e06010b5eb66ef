"""Nothing expires because the system clock was wrong for a while."""

from __future__ import annotations

from dataclasses import dataclass

from server.storage.database import ExpiryClock

HOUR, DAY = 3600.0, 86400.0


@dataclass
class Clocks:
    """A host's two clocks, and the one under test."""

    system: float = 1_000_000.0
    passed: float = 50.0

    def __post_init__(self) -> None:
        self.clock = ExpiryClock(lambda: self.system, lambda: self.passed)

    def after(self, seconds: float, jump: float = 0.0) -> float:
        """Return how far the clock under test has gone since its start."""
        self.passed += seconds
        self.system += seconds + jump
        return self.clock.now() - 1_000_000.0


def test_time_that_passes_counts() -> None:
    clocks = Clocks()
    assert clocks.after(5) == 5
    assert clocks.after(3 * DAY) == 3 * DAY + 5


def test_a_jump_forward_that_is_taken_back_expires_nothing() -> None:
    clocks = Clocks()
    assert clocks.after(10, jump=2 * DAY) == 10
    assert clocks.after(HOUR / 2) == HOUR / 2 + 10
    assert clocks.after(10, jump=-2 * DAY) == HOUR / 2 + 20
    # The next jump has an hour of its own.
    assert clocks.after(HOUR, jump=DAY) == 1.5 * HOUR + 20


def test_a_jump_forward_that_stays_is_followed() -> None:
    clocks = Clocks()
    assert clocks.after(10, jump=2 * DAY) == 10
    assert clocks.after(HOUR) == HOUR + 10 + 2 * DAY


def test_a_jump_backward_is_followed_at_once() -> None:
    clocks = Clocks()
    assert clocks.after(10, jump=-DAY) == 10 - DAY
    assert clocks.after(5) == 15 - DAY


def test_small_corrections_are_no_jumps() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.after(HOUR, jump=1)
    assert clocks.clock.now() == clocks.system
