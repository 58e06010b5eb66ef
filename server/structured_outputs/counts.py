"""What the gate tells the metrics."""

from __future__ import annotations

from collections import Counter, deque

RESULTS = ("ok", "known", "refused", "timeout", "crashed", "overloaded", "not_started")
"""How a check can end; the label of its metric."""
_KEPT_SECONDS = 4096


class CheckCounts:
    """What the gate has done since it was last asked."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        # Of trials; only so many are kept, should nobody ask.
        self.seconds: deque[float] = deque(maxlen=_KEPT_SECONDS)

    def note(self, result: str, seconds: float | None = None) -> None:
        """Note a check, and the seconds of its trial if it had one."""
        self.results[result] += 1
        if seconds is not None:
            self.seconds.append(seconds)
