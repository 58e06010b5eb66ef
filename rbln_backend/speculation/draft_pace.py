"""`DraftPace`: the steps after which a draft model drafts: all while that pays, else ever fewer."""

from __future__ import annotations

_LONGEST = 64
"""Most steps from one trial to the next: a trial costs about as much as a step."""
_SOONER = 8
"""A trial whose drafts were right is repeated after this part of the steps."""


class DraftPace:
    """Steps between two runs of a draft model.

    They double after each run whose drafts are not worth their time and halve after each other
    one, so that a few steps with a gain do not end a long pause for good.
    """

    def __init__(self) -> None:
        self._pause = self._left = 1

    def is_due(self) -> bool:
        """Count a step; return True if drafts are to be computed after it."""
        self._left -= 1
        return self._left <= 0

    def record(self, pays: bool) -> None:
        """Set the next run by whether the drafts of the latest one are expected to pay."""
        self._pause = max(self._pause // 2, 1) if pays else min(self._pause * 2, _LONGEST)
        self._left = 1 if pays else self._pause

    def hurry(self) -> None:
        """Run sooner, because the drafts of the latest run have turned out right."""
        self._left = min(self._left, max(self._pause // _SOONER, 1))
