"""Results and durations of jobs in worker processes, for the metrics."""

from __future__ import annotations

from collections import Counter, deque

GRAMMAR_RESULTS = (
    *("ok", "known", "refused", "spent", "timeout", "crashed", "overloaded", "not_started"),
)
"""Results of grammar checks, the label of their metric."""
READING_RESULTS = ("ok", "refused", "timeout", "crashed", "overloaded", "not_started")
"""Results of reading large bodies, the label of their metric."""
_MAX_DURATIONS = 4096


class JobCounts:
    """Results and durations of jobs since the last scrape."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        # Bounded, in case /metrics is never scraped.
        self.seconds: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self.sizes: deque[int] = deque(maxlen=_MAX_DURATIONS)

    def note(self, result: str, seconds: float | None = None, size: int | None = None) -> None:
        """Count a job's result, its duration if it ran, and the bytes of what it made."""
        self.results[result] += 1
        if seconds is not None:
            self.seconds.append(seconds)
        if size is not None:
            self.sizes.append(size)
