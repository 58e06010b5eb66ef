"""A text of token ids, and where in it each short run of them was seen."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

ROOM = 1 << 20
"""Tokens of one request that are looked through."""
GAP = -1
"""Between two texts: no token, so that nothing is read across it."""
_TOKEN_BITS = 32


class TextIndex:
    """The last ``room`` tokens of what was appended, found by the ``gram`` tokens before a place.

    A place is a number of tokens appended so far, and means the same for ever. Places with the
    same tokens before them are chained from the latest back, as LZ77 coders do it: appending and
    following a chain cost the same however long the text is, and memory is bounded by ``room``.
    """

    def __init__(self, gram: int, room: int) -> None:
        """Raises ``ValueError`` for less than one token of either."""
        if gram < 1 or room < gram:
            raise ValueError(f"a text of {room} tokens cannot be found by {gram}")
        self.gram = gram
        self.start = 0
        """Of the text that counts; the owner may move it on to forget what lies before."""
        self._room = room
        self._mask = (1 << gram * _TOKEN_BITS) - 1
        self._key = 0
        self._end = 0
        self._known = 0
        """Tokens since the last gap."""
        self._tokens: list[int] = []
        self._keys: list[int | None] = []
        self._before = array("q")
        self._latest: dict[int, int] = {}

    def __len__(self) -> int:
        """How many tokens were ever appended: the place after the last."""
        return self._end

    @property
    def held(self) -> int:
        """How many tokens are in memory."""
        return len(self._tokens)

    @property
    def key(self) -> int | None:
        """What the last ``gram`` tokens are found by; None where there are too few."""
        return self._key if self._known >= self.gram else None

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        key, known, end, room = self._key, self._known, self._end, self._room
        for token in tokens:
            slot = end % room
            if end >= room:
                self._forget(slot, end - room + 1)
            end += 1
            known = 0 if token == GAP else known + 1
            key = (key << _TOKEN_BITS | token + 1) & self._mask
            found_by = key if known >= self.gram else None
            place = self._latest.get(key, -1) if found_by is not None else -1
            if end > room:
                self._tokens[slot], self._keys[slot], self._before[slot] = token, found_by, place
            else:
                self._tokens.append(token)
                self._keys.append(found_by)
                self._before.append(place)
            if found_by is not None:
                self._latest[key] = end
        self._key, self._known, self._end = key, known, end

    def at(self, place: int) -> int:
        """The token that follows ``place``; ``GAP`` where none does or it is forgotten."""
        if self.start <= place < self._end:
            return self._tokens[place % self._room]
        return GAP

    def places(self, key: int | None, most: int) -> list[int]:
        """At most ``most`` places before the end that ``key`` leads to, the latest first."""
        found: list[int] = []
        if key is None:
            return found
        oldest, before, room = self.start + self.gram, self._before, self._room
        place = self._latest.get(key, -1)
        if place == self._end:
            place = before[(place - 1) % room]
        while place >= oldest and len(found) < most:
            found.append(place)
            place = before[(place - 1) % room]
        return found

    def match(self, place: int, tail: Sequence[int]) -> int:
        """How many tokens before ``place``, one of ``places``, are those at the end of ``tail``."""
        tokens, room = self._tokens, self._room
        length, most = self.gram, min(len(tail), place - self.start)
        while length < most and tokens[(place - 1 - length) % room] == tail[-1 - length]:
            length += 1
        return length

    def continuation(self, place: int, limit: int) -> list[int]:
        """At most ``limit`` tokens from ``place`` on.

        Where the text ends it is taken to repeat itself from ``place``.
        """
        if not self.start <= place < self._end:
            return []
        found = self._between(place, min(place + limit, self._end))
        if GAP in found:
            return found[: found.index(GAP)]
        return (found * limit)[:limit] if len(found) < limit else found

    def _between(self, first: int, last: int) -> list[int]:
        slot = first % self._room
        end = slot + last - first
        found = self._tokens[slot:end]
        return found if end <= self._room else found + self._tokens[: end - self._room]

    def _forget(self, slot: int, place: int) -> None:
        """Take a place from the chains whose slot is wanted."""
        self.start = max(self.start, place)
        key = self._keys[slot]
        if key is not None and self._latest[key] == place:
            del self._latest[key]
