"""The interface of drafters, drafts from a client's prediction, and the budget of drafts.

A step that checks drafts takes longer than a plain one, the time of a draft model included, and
pays where it brings more tokens in return. What checks gain and lose is counted in plain steps of
the same bucket. Where they have lost the bucket's budget, nothing is drafted until ``SHARE`` of
each plain step has made up for the loss; then one check tries again. So checks that never pay cost
``FIRST`` steps once and ``SHARE`` of the time, and drafts that become right are noticed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

EXTRA_ARGS = "speculation"
"""The key of a request's draft settings in its sampling parameters' ``extra_args``."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Draft settings of a request, and their defaults."""

    off: bool = False
    prediction: tuple[int, ...] = ()
    """Token ids of the text that the client expects."""
    key: str | None = None
    """The name of the API key, None without one. Answers of one key are no drafts for others."""

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None) -> DraftSettings:
        """Read ``{"off": bool, "prediction": [token ids], "key": str | None}``, all optional.

        Anything but a mapping counts as absent: clients of vLLM's own server can write it.
        """
        given = (extra_args or {}).get(EXTRA_ARGS)
        if not isinstance(given, Mapping):
            return cls()
        off, prediction = bool(given.get("off", False)), tuple(given.get("prediction", ()))
        return cls(off, prediction, given.get("key"))


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """A request as drafters see it."""

    request_id: str
    prompt: Sequence[int]
    """Token ids."""
    prediction: Sequence[int] = ()
    """Token ids of the text that the client expects."""
    adapter: str | None = None
    key: str | None = None
    """See ``DraftSettings.key``."""


class Drafter(Protocol):
    """Proposes drafts from texts it has seen; deterministic: equal calls give equal drafts.

    Raises ``KeyError`` for ids without ``begin``.
    """

    def begin(self, request: DraftedRequest) -> None:
        """Add a request whose prompt has been computed."""

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Append sampled tokens, drafted or not."""

    def propose(self, request_id: str, limit: int) -> list[int]:
        """Return at most ``limit`` tokens that may come next; none without a match."""

    def end(self, request_id: str, finished: bool) -> None:
        """Remove a request; not ``finished``: it was aborted, and its answer is incomplete."""


_NEAR = 64
"""Tokens after an edit within which a match of two resynchronises the cursor; elsewhere three."""
_NEXT = 8
"""Tokens within which a match of one does, right after the answer has left the prediction."""
_TRIED = 8
"""Most occurrences of two tokens that are tried in each direction."""


class Prediction:
    """A cursor in one predicted text, moved by the tokens of the answer.

    It depends on these tokens alone, not on how many arrive at a time. Where the answer leaves the
    prediction, the next draft assumes that predicted tokens were left out, else that one was
    replaced. After that the cursor moves to where the latest tokens occur in the prediction.
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        self.matched = 0
        """Tokens of the answer that were predicted."""
        self._predicted = list(predicted)
        self._ends: dict[tuple[int, int], list[int]] = {}
        for end in range(2, len(predicted) + 1):
            self._ends.setdefault((predicted[end - 2], predicted[end - 1]), []).append(end)
        self._cursor: int | None = 0
        self._last_match = 0
        self._tail: tuple[int, ...] = ()

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._take(token)

    def propose(self, limit: int) -> list[int]:
        """Return at most `limit` tokens of the prediction from the cursor on."""
        if self._cursor is None:
            return []
        return self._predicted[self._cursor : self._cursor + limit]

    def _take(self, token: int) -> None:
        cursor = self._cursor
        self._tail = (*self._tail, token)[-3:]
        if cursor is not None and self._predicted[cursor : cursor + 1] == [token]:
            self.matched += 1
            self._cursor = self._last_match = cursor + 1
            return
        if cursor != self._last_match:
            self._cursor = self._resynchronised()
            return
        # The answer has just left the prediction.
        first = self._last_match + 1
        left_out = self._predicted[first : first + _NEXT]
        self._cursor = first + 1 + left_out.index(token) if token in left_out else first

    def _resynchronised(self) -> int | None:
        """Return the position after an occurrence of the last tokens, the nearest ahead first."""
        if len(self._tail) < 2:
            return None
        ends = self._ends.get((self._tail[-2], self._tail[-1]), [])
        first = bisect_left(ends, self._last_match)
        ahead, behind = ends[first : first + _TRIED], ends[max(first - _TRIED, 0) : first][::-1]
        for end in ahead + behind:
            is_near = 0 <= end - self._last_match <= _NEAR
            if is_near or (
                len(self._tail) == 3 and self._predicted[end - 3 : end] == [*self._tail]
            ):
                return end
        return None


class PredictionFirst:
    """A ``Drafter`` that uses a request's prediction first, then another drafter."""

    def __init__(self, other: Drafter) -> None:
        self._other = other
        self._predictions: dict[str, Prediction] = {}

    def begin(self, request: DraftedRequest) -> None:
        self._other.begin(request)
        if request.prediction:
            self._predictions[request.request_id] = Prediction(request.prediction)

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        self._other.extend(request_id, tokens)
        if request_id in self._predictions:
            self._predictions[request_id].extend(tokens)

    def propose(self, request_id: str, limit: int) -> list[int]:
        return self.predicted(request_id, limit) or self._other.propose(request_id, limit)

    def predicted(self, request_id: str, limit: int) -> list[int]:
        """Return at most ``limit`` tokens of the request's prediction that may come next."""
        prediction = self._predictions.get(request_id)
        return [] if prediction is None else prediction.propose(limit)

    def end(self, request_id: str, finished: bool) -> None:
        self._other.end(request_id, finished)
        self._predictions.pop(request_id, None)


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
