"""What is done in processes beside the event loop, as the metrics hear of it."""

from __future__ import annotations

from collections import Counter, deque

GRAMMAR_RESULTS = (
    *("ok", "known", "refused", "spent", "timeout", "crashed", "overloaded", "not_started"),
)
"""How the check of a grammar can end; the label of its metric."""
READING_RESULTS = ("ok", "refused", "timeout", "crashed", "overloaded", "not_started")
"""How the reading of a large body can end; the label of its metric."""
_KEPT_SECONDS = 4096


class JobCounts:
    """What was done since somebody last asked."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        # Only so many are kept, should nobody ask.
        self.seconds: deque[float] = deque(maxlen=_KEPT_SECONDS)

    def note(self, result: str, seconds: float | None = None) -> None:
        """Note how a job ended, and its seconds if it was done at all."""
        self.results[result] += 1
        if seconds is not None:
            self.seconds.append(seconds)
