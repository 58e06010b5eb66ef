"""A text of token ids with an index of its n-grams."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

MAX_TEXT_TOKENS = 1 << 20
"""Latest tokens of one request that are searched."""
GAP = -1
"""Separator of two texts, equal to no token: no match or continuation crosses it."""
_TOKEN_BITS = 32


class TextIndex:
    """The last ``capacity`` tokens appended, with an index of the positions after each n-gram.

    A position is the number of tokens appended before it, and never changes. Positions after equal
    n-grams of ``gram`` tokens are chained from the latest back, as in LZ77 coders: the cost of
    appending and of following a chain does not depend on the length of the text.
    """

    def __init__(self, gram: int, capacity: int) -> None:
        """Raises ``ValueError`` for less than one token of either."""
        if gram < 1 or capacity < gram:
            raise ValueError(f"a text of {capacity} tokens cannot be found by {gram}")
        self.gram = gram
        self.start = 0
        """First position that is searched; the owner may move it forward."""
        self._capacity = capacity
        self._mask = (1 << gram * _TOKEN_BITS) - 1
        self._key = 0
        self._end = 0
        self._since_gap = 0
        """Tokens since the last gap."""
        self._tokens: list[int] = []
        self._keys: list[int | None] = []
        self._before = array("q")
        self._latest: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of tokens ever appended: the position after the last."""
        return self._end

    @property
    def num_tokens(self) -> int:
        """Tokens in memory."""
        return len(self._tokens)

    @property
    def key(self) -> int | None:
        """The key of the last ``gram`` tokens for ``positions``; None where there are too few."""
        return self._key if self._since_gap >= self.gram else None

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        key, since_gap, end, capacity = self._key, self._since_gap, self._end, self._capacity
        for token in tokens:
            slot = end % capacity
            if end >= capacity:
                self._unlink(slot, end - capacity + 1)
            end += 1
            since_gap = 0 if token == GAP else since_gap + 1
            key = (key << _TOKEN_BITS | token + 1) & self._mask
            indexed = key if since_gap >= self.gram else None
            before = self._latest.get(key, -1) if indexed is not None else -1
            if end > capacity:
                self._tokens[slot], self._keys[slot], self._before[slot] = token, indexed, before
            else:
                self._tokens.append(token)
                self._keys.append(indexed)
                self._before.append(before)
            if indexed is not None:
                self._latest[key] = end
        self._key, self._since_gap, self._end = key, since_gap, end

    def at(self, position: int) -> int:
        """Return the token at ``position``, ``GAP`` outside the text in memory."""
        if self.start <= position < self._end:
            return self._tokens[position % self._capacity]
        return GAP

    def positions(self, key: int | None, most: int) -> list[int]:
        """Return at most ``most`` positions of ``key`` before the end, the latest first."""
        found: list[int] = []
        if key is None:
            return found
        oldest, before, capacity = self.start + self.gram, self._before, self._capacity
        position = self._latest.get(key, -1)
        if position == self._end:
            position = before[(position - 1) % capacity]
        while position >= oldest and len(found) < most:
            found.append(position)
            position = before[(position - 1) % capacity]
        return found

    def match(self, position: int, tail: Sequence[int]) -> int:
        """Return how many tokens before ``position``, one of ``positions``, end ``tail``."""
        tokens, capacity = self._tokens, self._capacity
        length, most = self.gram, min(len(tail), position - self.start)
        while length < most and tokens[(position - 1 - length) % capacity] == tail[-1 - length]:
            length += 1
        return length

    def continuation(self, position: int, limit: int) -> list[int]:
        """Return at most ``limit`` tokens from ``position`` on.

        At its end the text is assumed to repeat itself from ``position``.
        """
        if not self.start <= position < self._end:
            return []
        found = self._between(position, min(position + limit, self._end))
        if GAP in found:
            return found[: found.index(GAP)]
        return (found * limit)[:limit] if len(found) < limit else found

    def _between(self, first: int, last: int) -> list[int]:
        slot = first % self._capacity
        end = slot + last - first
        found = self._tokens[slot:end]
        return found if end <= self._capacity else found + self._tokens[: end - self._capacity]

    def _unlink(self, slot: int, position: int) -> None:
        """Remove the oldest position from its chain, so that its slot can be reused."""
        self.start = max(self.start, position)
        key = self._keys[slot]
        if key is not None and self._latest[key] == position:
            del self._latest[key]
