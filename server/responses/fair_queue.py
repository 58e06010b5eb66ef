"""The queue of responses in the background: owners take turns."""

from __future__ import annotations

from collections import Counter, deque

from server.responses.table import Waiting


class FairQueue:
    """Queue of ids, by owner. Used from the event loop.

    The next turn is that of the owner with the fewest running responses; among equals, of the one
    whose last turn is the longest ago.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, waiting: Waiting) -> None:
        """Add a response behind the others of its owner."""
        self._waiting.setdefault(waiting.owner, deque()).append(waiting.id)

    def remove(self, waiting: Waiting) -> None:
        """Remove a response that waits."""
        self._waiting[waiting.owner].remove(waiting.id)
        self._forget_empty(waiting.owner)

    def take(self, running: Counter[str]) -> Waiting | None:
        """Remove and return the response whose turn it is; `running` counts by owner."""
        if not self._waiting:
            return None
        owner = min(self._waiting, key=running.__getitem__)
        turn = Waiting(self._waiting[owner].popleft(), owner)
        # To the end of the order in which equals are chosen.
        self._waiting[owner] = self._waiting.pop(owner)
        self._forget_empty(owner)
        return turn

    def _forget_empty(self, owner: str) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]
