"""How many drafts of a request are worth checking, after how its latest ones did."""

from __future__ import annotations

LONGEST_PAUSE = 64
"""Tokens that a request goes without drafts at most, however often they were wrong."""


class Trust:
    """Lengths follow what was right; whoever is wrong from the first draft on is left alone.

    Each such miss doubles the pause in tokens, so that text which cannot be guessed soon costs one
    checked draft in ``LONGEST_PAUSE`` tokens. What was right ends it at once.
    """

    def __init__(self, most: int) -> None:
        """``most``: drafts of a step."""
        self._most = most
        self._limit = most
        self._pause = 0
        self._left = 0

    def limit(self) -> int:
        """How many drafts the next step may check; 0 during a pause."""
        return 0 if self._left else self._limit

    def judge(self, drafted: int, right: int) -> None:
        """A step checked ``drafted`` drafts, of which the first ``right`` were right."""
        self._left = max(0, self._left - 1 - right)
        if not drafted:
            return
        if right:
            self._pause = 0
            # One more draft than were right, and twice as many where all were.
            self._limit = min(self._most, 2 * right if right == drafted else right + 1)
            return
        self._limit = 1
        self._pause = min(LONGEST_PAUSE, max(1, 2 * self._pause))
        self._left = self._pause
