"""Drafts from the text that a client expects: where the answer is in it, also after an edit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rbln_backend.speculation.drafter import NO_DRAFT, Draft, DraftedRequest, Drafter

_NEAR = 64
"""Tokens after an edit within which two in a row say where the answer is again; elsewhere three."""
_NEXT = 8
"""Tokens within which one says so, right after the answer has left the prediction."""
_TRIED = 8
"""Places that two tokens in a row may be at."""


class Prediction:
    """A cursor in one expected text, moved by the tokens of the answer.

    It depends on these tokens alone, however many came at a time. Where the answer leaves the
    prediction, the next guess is that predicted tokens were left out, or else that one was
    replaced; after that the tokens say where the answer is again.
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        """`predicted` are token ids."""
        self.matched = 0
        """Tokens of the answer that were as the prediction had them."""
        self._predicted = list(predicted)
        self._ends: dict[tuple[int, int], list[int]] = {}
        for end in range(2, len(predicted) + 1):
            self._ends.setdefault((predicted[end - 2], predicted[end - 1]), []).append(end)
        self._cursor: int | None = 0
        self._sure = 0
        self._agreed = 0
        self._tail: tuple[int, ...] = ()

    def extend(self, tokens: Sequence[int]) -> None:
        """The answer goes on."""
        for token in tokens:
            self._take(token)

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens that the prediction has next."""
        if self._cursor is None:
            return NO_DRAFT
        return Draft(self._predicted[self._cursor : self._cursor + limit], self._agreed)

    def _take(self, token: int) -> None:
        cursor = self._cursor
        self._tail = (*self._tail, token)[-3:]
        if cursor is not None and self._predicted[cursor : cursor + 1] == [token]:
            self.matched += 1
            self._agreed += 1
            self._cursor = self._sure = cursor + 1
            return
        self._agreed = 0
        if cursor == self._sure:
            self._cursor = self._after_leaving(token)
        else:
            self._cursor = self._found_again()

    def _after_leaving(self, token: int) -> int:
        left_out = self._predicted[self._sure + 1 : self._sure + 1 + _NEXT]
        return self._sure + 2 + left_out.index(token) if token in left_out else self._sure + 1

    def _found_again(self) -> int | None:
        """The place that the last tokens lead to, the nearest after where the answer was."""
        if len(self._tail) < 2:
            return None
        ends = self._ends.get((self._tail[-2], self._tail[-1]), [])
        first = bisect_left(ends, self._sure)
        ahead, behind = ends[first : first + _TRIED], ends[max(first - _TRIED, 0) : first][::-1]
        for end in ahead + behind:
            is_near = 0 <= end - self._sure <= _NEAR
            if is_near or (
                len(self._tail) == 3 and self._predicted[end - 3 : end] == [*self._tail]
            ):
                return end
        return None


class PredictionFirst:
    """A ``Drafter`` that asks a request's prediction first, then another."""

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

    def propose(self, request_id: str, limit: int) -> Draft:
        """See ``Drafter``."""
        prediction = self._predictions.get(request_id)
        predicted = prediction.propose(limit) if prediction is not None else NO_DRAFT
        return predicted if predicted.tokens else self._other.propose(request_id, limit)

    def end(self, request_id: str, finished: bool) -> None:
        """See ``Drafter``."""
        self._other.end(request_id, finished)
        self._predictions.pop(request_id, None)
