"""The recent acceptance rate of a request's drafts, by the length of the match before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from rbln_backend.speculation.drafter import NO_DRAFT, Draft

_INITIAL_RATES = (0.6, 0.6, 0.35, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85, 0.9)
"""By match length. A client's prediction starts with a match of length 0."""
_INITIAL_COMPUTED = 0.3
"""Of the first draft of a draft model. It is compared with the sampled token without a check."""
_INITIAL_WEIGHT = 2
"""Drafts that an initial rate counts for."""
_WINDOW = 16
"""Drafts that a rate is a running mean of."""


class Acceptance:
    """The share of drafted tokens that were sampled, by the length of the match before each.

    A draft's first token has a match of ``Draft.match_length`` tokens, the next one of one token
    more: one table serves all positions. The tokens sampled after a draft show if it was right,
    also if no step checked it.
    """

    def __init__(self, *, is_computed: bool = False) -> None:
        """``is_computed``: of the drafts of a draft model, which all have a match of 0."""
        first = _INITIAL_COMPUTED if is_computed else _INITIAL_RATES[0]
        self._rates = [first, *_INITIAL_RATES[1:]]
        self._counts = [_INITIAL_WEIGHT] * len(_INITIAL_RATES)
        self._draft = NO_DRAFT

    def expect(self, draft: Draft) -> list[float]:
        """Return the expected right tokens if the first 1, 2, … tokens of a draft are checked."""
        self._draft = draft
        lengths = range(draft.match_length, draft.match_length + len(draft.tokens))
        chances = accumulate((self._rates[self._index(length)] for length in lengths), mul)
        return list(accumulate(chances))

    def record(self, tokens: Sequence[int]) -> bool | None:
        """Compare the draft of the latest ``expect`` with the ``tokens`` sampled in its place.

        What is left of a right draft is compared with the next tokens, unless another ``expect``
        comes before: of a draft that no step checks, each step samples one token. Returns True if
        the draft's next token was right, None if there is nothing to compare.
        """
        draft, self._draft = self._draft, NO_DRAFT
        for position, (drafted, token) in enumerate(zip(draft.tokens, tokens, strict=False)):
            self._count(self._index(draft.match_length + position), drafted == token)
            if drafted != token:
                break
        if not (draft.tokens and tokens):
            return None
        if draft.tokens[: len(tokens)] == list(tokens):
            length = draft.match_length + len(tokens)
            self._draft = Draft(draft.tokens[len(tokens) :], length, draft.is_computed)
        return draft.tokens[0] == tokens[0]

    def _index(self, match_length: int) -> int:
        return min(match_length, len(self._rates) - 1)

    def _count(self, index: int, right: bool) -> None:
        self._counts[index] = min(self._counts[index] + 1, _WINDOW)
        self._rates[index] += (right - self._rates[index]) / self._counts[index]
