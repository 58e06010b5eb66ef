"""Finished answers as texts to draft from, separate by owner and bounded in memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rbln_backend.speculation.text_index import GAP, TextIndex

_MAX_OWNERS = 256


@dataclass(frozen=True, slots=True)
class Owner:
    """The adapter and API key of answers, which are never drafts for another owner."""

    adapter: str | None
    key: str | None


class _OwnedAnswers:
    """The answers of one owner."""

    def __init__(self, gram: int, capacity: int) -> None:
        self.text = TextIndex(gram, capacity)
        self._starts: deque[int] = deque()

    def add(self, answer: Sequence[int], most: int) -> int:
        """Add an answer, evict the oldest beyond ``most``; return the growth in tokens."""
        before = self.text.num_tokens
        self._starts.append(len(self.text))
        self.text.extend((GAP, *answer, GAP))
        while len(self._starts) > most:
            self._starts.popleft()
            self.text.start = max(self.text.start, self._starts[0])
        return self.text.num_tokens - before


class PastAnswers:
    """Finished answers: at most ``max_answers`` of an owner, ``max_tokens`` in all.

    At most ``_MAX_OWNERS`` owners have answers; the least recently used one is evicted first. One
    owner may hold a quarter of the tokens, so that its answers do not evict all others.
    """

    def __init__(self, gram: int, max_answers: int, max_tokens: int) -> None:
        self._gram, self._max_answers, self._max_tokens = gram, max_answers, max_tokens
        self._by_owner: OrderedDict[Owner, _OwnedAnswers] = OrderedDict()
        self.num_tokens = 0
        """Tokens in memory."""

    def of(self, owner: Owner) -> TextIndex | None:
        """Return the owner's answers, None without any."""
        answers = self._by_owner.get(owner)
        if answers is None:
            return None
        self._by_owner.move_to_end(owner)
        return answers.text

    def add(self, owner: Owner, answer: Sequence[int]) -> None:
        """Add a finished answer, or the end of one that is longer than an owner's share."""
        capacity = self._max_tokens // 4
        if self._max_answers == 0 or len(answer) <= self._gram or capacity <= self._gram:
            return
        if owner not in self._by_owner:
            self._by_owner[owner] = _OwnedAnswers(self._gram, capacity)
        answers = self._by_owner[owner]
        self._by_owner.move_to_end(owner)
        self.num_tokens += answers.add(answer[-capacity:], self._max_answers)
        while self.num_tokens > self._max_tokens or len(self._by_owner) > _MAX_OWNERS:
            _, oldest = self._by_owner.popitem(last=False)
            self.num_tokens -= oldest.text.num_tokens
