"""Drafts from a client's prediction: tracks the answer's position in it, also after edits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rbln_backend.speculation.drafter import DraftedRequest, Drafter

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
        """`predicted` are token ids."""
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
        """Append tokens of the answer."""
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
        if cursor == self._last_match:
            self._cursor = self._after_leaving(token)
        else:
            self._cursor = self._resynchronised()

    def _after_leaving(self, token: int) -> int:
        first = self._last_match + 1
        left_out = self._predicted[first : first + _NEXT]
        return first + 1 + left_out.index(token) if token in left_out else first

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
        """See ``Drafter``."""
        self._other.begin(request)
        if request.prediction:
            self._predictions[request.request_id] = Prediction(request.prediction)

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See ``Drafter``."""
        self._other.extend(request_id, tokens)
        if request_id in self._predictions:
            self._predictions[request_id].extend(tokens)

    def propose(self, request_id: str, limit: int) -> list[int]:
        """See ``Drafter``."""
        return self.predicted(request_id, limit) or self._other.propose(request_id, limit)

    def predicted(self, request_id: str, limit: int) -> list[int]:
        """Return at most ``limit`` tokens of the request's prediction that may come next."""
        prediction = self._predictions.get(request_id)
        return [] if prediction is None else prediction.propose(limit)

    def end(self, request_id: str, finished: bool) -> None:
        """See ``Drafter``."""
        self._other.end(request_id, finished)
        self._predictions.pop(request_id, None)
