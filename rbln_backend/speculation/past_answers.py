"""Finished answers as texts to guess from, those of each owner apart and all within bounds."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rbln_backend.speculation.text_index import GAP, TextIndex

_MAX_OWNERS = 256


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose answers they are: texts of one are never drafts for another."""

    adapter: str | None
    key: str | None


class _Shelf:
    """The answers of one owner."""

    def __init__(self, gram: int, room: int) -> None:
        self.text = TextIndex(gram, room)
        self._starts: deque[int] = deque()

    def add(self, answer: Sequence[int], most: int) -> int:
        """Keep an answer, forget the oldest of more than ``most``; return the tokens it takes."""
        held = self.text.held
        self._starts.append(len(self.text))
        self.text.extend((GAP, *answer, GAP))
        while len(self._starts) > most:
            self._starts.popleft()
            self.text.start = max(self.text.start, self._starts[0])
        return self.text.held - held


class PastAnswers:
    """Invariants: at most ``max_answers`` of an owner, at most ``max_tokens`` of all
    together, and no more than ``_MAX_OWNERS`` of them.

    The owner who has not been looked for the longest is forgotten first. An owner alone may have a
    quarter of the tokens, so that one that answers much does not at once drive out the others.
    """

    def __init__(self, gram: int, max_answers: int, max_tokens: int) -> None:
        self._gram, self._max_answers, self._max_tokens = gram, max_answers, max_tokens
        self._shelves: OrderedDict[Owner, _Shelf] = OrderedDict()
        self.held = 0
        """How many tokens are in memory."""

    def of(self, owner: Owner) -> TextIndex | None:
        """The owner's answers, if there are any."""
        shelf = self._shelves.get(owner)
        if shelf is None:
            return None
        self._shelves.move_to_end(owner)
        return shelf.text

    def add(self, owner: Owner, answer: Sequence[int]) -> None:
        """Keep a finished answer; what is longer than there is room for by its end."""
        room = self._max_tokens // 4
        if self._max_answers == 0 or len(answer) <= self._gram or room <= self._gram:
            return
        if owner not in self._shelves:
            self._shelves[owner] = _Shelf(self._gram, room)
        shelf = self._shelves[owner]
        self._shelves.move_to_end(owner)
        self.held += shelf.add(answer[-room:], self._max_answers)
        while self.held > self._max_tokens or len(self._shelves) > _MAX_OWNERS:
            _, oldest = self._shelves.popitem(last=False)
            self.held -= oldest.text.held
