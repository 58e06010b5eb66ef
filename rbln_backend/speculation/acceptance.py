"""How often a request's drafts came true lately, by how much spoke for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from rbln_backend.speculation.drafter import NO_DRAFT, Draft

_BY_AGREED = (0.6, 0.6, 0.35, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.8, 0.85, 0.85, 0.9)
"""What is believed of a request at first. A prediction begins with nothing that speaks for it."""
_AT_FIRST = 2
"""Drafts that what is believed at first counts for."""
_LATELY = 16
"""Drafts that what was seen is remembered for."""


class Acceptance:
    """The share of drafted tokens that came true, by the tokens in agreement before each.

    A draft's first token has ``Draft.agreed`` of them, the next one more: so one table serves every
    place of a draft. What comes after a draft says whether it was right, checked or not: nothing
    has to be tried to be known.
    """

    def __init__(self) -> None:
        self._share = list(_BY_AGREED)
        self._seen = [_AT_FIRST] * len(_BY_AGREED)
        self._draft = NO_DRAFT

    def guess(self, draft: Draft) -> list[float]:
        """How many tokens of a draft are expected to be right if its first 1, 2, … are checked."""
        self._draft = draft
        places = range(draft.agreed, draft.agreed + len(draft.tokens))
        chances = accumulate((self._share[self._class(place)] for place in places), mul)
        return list(accumulate(chances))

    def note(self, tokens: Sequence[int]) -> None:
        """``tokens`` came where the latest draft was guessed."""
        draft, self._draft = self._draft, NO_DRAFT
        for place, (drafted, token) in enumerate(zip(draft.tokens, tokens, strict=False)):
            self._count(self._class(draft.agreed + place), drafted == token)
            if drafted != token:
                return

    def _class(self, agreed: int) -> int:
        return min(agreed, len(self._share) - 1)

    def _count(self, agreed: int, right: bool) -> None:
        self._seen[agreed] = min(self._seen[agreed] + 1, _LATELY)
        self._share[agreed] += (right - self._share[agreed]) / self._seen[agreed]
