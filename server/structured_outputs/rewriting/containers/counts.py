"""Counts of items and members in a grammar."""

from __future__ import annotations

from dataclasses import dataclass

MAX_STATES = 10_000
"""Most rules that count one array or object."""


@dataclass(frozen=True, slots=True)
class CountRange:
    """Counts from `least` to `most`; a grammar distinguishes `size` of them."""

    least: int
    most: int | None

    @property
    def size(self) -> int:
        """Number of distinguished counts; without `most`, all counts from `least` are one.

        0 and 1 always differ, because the first item has no comma.
        """
        return (max(1, self.least) if self.most is None else self.most) + 1

    def after(self, count: int) -> int | None:
        """Return the next count, or None if no more are allowed."""
        if count + 1 < self.size:
            return count + 1
        return count if self.most is None else None

    def is_enough(self, count: int) -> bool:
        """Return True if the count is at least `least`."""
        return count >= self.least


def several(item: str, least: int, most: int | None) -> str:
    """Return `least` to `most` of an item; the dialect has no `{0,0}`."""
    low = max(0, least)
    if most is None:
        return f"({item}){{{low},}}" if low else f"({item})*"
    return f"({item}){{{low},{most}}}" if most else '""'
