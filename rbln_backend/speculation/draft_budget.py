"""`DraftBudget`: stops drafting while fewer drafts are accepted than pay.

A step that checks drafts takes longer than a plain one, the time of a draft model included, and
pays where it brings more tokens in return. What checks gain and lose is counted in plain steps of
the same bucket. Where they have lost the bucket's budget, nothing is drafted until ``SHARE`` of
each plain step has made up for the loss; then one check tries again. So checks that never pay cost
``FIRST`` steps once and ``SHARE`` of the time, and drafts that become right are noticed.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

SHARE = 0.02
"""Part of the time of plain steps that checks may lose."""
FIRST = 4.0
"""Plain steps that the checks of a bucket may lose before the first pause."""
MOST = 8.0
"""Plain steps that they may lose after others that paid."""
LARGEST_LOSS = 4.0
"""Plain steps: a check that lost more counts as this much, because something interrupted it."""
LEAST_PLAIN = 3
"""Plain steps of a bucket before its first check, to know what they take."""
MOST_CHECKS = 64
"""Checks after which a plain step shows what it takes by now: contexts grow and shrink."""
_LATEST = 5
"""Plain steps of which the median time counts."""


@dataclass(slots=True)
class _Bucket:
    plain_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    budget: float = FIRST
    pause: int = 0
    """Plain steps until the next check."""
    checks: int = 0
    """Since the latest plain step."""


class DraftBudget:
    """Counts the steps of an engine, by decode bucket."""

    def __init__(self, most: int, decide: Callable[[int], int]) -> None:
        """``most``: drafts of a request in a step. ``decide`` is called after each check.

        It returns the pause of the rank whose times count, at most ``LARGEST_LOSS / SHARE``, from
        this rank's own. Other ranks count the same steps, so that all draft after the same ones.
        """
        self._most, self._decide = most, decide
        self._buckets = defaultdict[int, _Bucket](_Bucket)

    def is_paused(self, bucket: int) -> bool:
        """Return whether the checks of a bucket have lost its budget, and it is not made up for."""
        return self._buckets[bucket].pause > 0

    def drafts(self, bucket: int) -> int:
        """Return how many drafts of a request the next step may check: all, or none."""
        own = self._buckets[bucket]
        is_known = len(own.plain_s) >= LEAST_PLAIN
        return self._most if is_known and not own.pause and own.checks < MOST_CHECKS else 0

    def plain(self, bucket: int, seconds: float) -> None:
        """Count a step without drafts."""
        own = self._buckets[bucket]
        own.plain_s.append(seconds)
        own.pause, own.checks = max(own.pause - 1, 0), 0

    def checked(self, bucket: int, seconds: float, tokens: float) -> float:
        """Count a step with drafts, drafting included, that brought ``tokens`` of each request.

        Returns its tokens per second relative to a plain step; 1.0 where that is not known yet.
        """
        own = self._buckets[bucket]
        if len(own.plain_s) < LEAST_PLAIN:
            return 1.0
        cost = seconds / median(own.plain_s)
        own.budget = min(own.budget + max(tokens - cost, -LARGEST_LOSS), MOST)
        own.checks += 1
        # The sum of another rank than the deciding one may fall without a pause.
        lost = min(max(-own.budget, 0.0), LARGEST_LOSS)
        own.pause = self._decide(math.ceil(lost / SHARE))
        if own.pause:
            own.budget = 0.0
        return tokens / cost
