"""Queue of background responses, fair between owners."""

from __future__ import annotations

from collections import Counter, deque

from server.storage.responses.table import Waiting


class FairQueue:
    """Queue of response ids, by owner. Used from the event loop.

    The next response is that of the owner with the fewest running ones; among equals, of the owner
    that was served least recently.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, waiting: Waiting) -> None:
        """Append a response to those of its owner."""
        self._waiting.setdefault(waiting.owner, deque()).append(waiting.id)

    def remove(self, waiting: Waiting) -> None:
        """Remove a waiting response."""
        self._waiting[waiting.owner].remove(waiting.id)
        self._drop_empty(waiting.owner)

    def take(self, running: Counter[str]) -> Waiting | None:
        """Remove and return the next response; `running` counts running ones by owner."""
        if not self._waiting:
            return None
        owner = min(self._waiting, key=running.__getitem__)
        response = Waiting(self._waiting[owner].popleft(), owner)
        # Move the owner to the end of the order for equals.
        self._waiting[owner] = self._waiting.pop(owner)
        self._drop_empty(owner)
        return response

    def _drop_empty(self, owner: str) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]
