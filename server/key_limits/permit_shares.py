"""Division of the permits of admission between API keys.

A quarter of the permits is kept for the keys, by their weights. The other permits are for every
request. So a key that floods the server leaves permits to the others, and a key alone on a server
with one key has all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

_KEPT = 4
"""One of so many permits is kept."""


class PermitShares:
    """Counts the permits of each owner. Invariant: the counts are positive."""

    def __init__(self, weights: Callable[[], Mapping[str, float]]) -> None:
        """`weights` returns the current weights of the keys by owner."""
        self._weights = weights
        self._held: Counter[str] = Counter()

    def fits(self, owner: str, more: int, limit: int) -> bool:
        """Return whether `owner` may take `more` permits of `limit`; less than 1 always fits.

        The permits that are free in total are not checked.
        """
        total = self._held.total() + more
        if more <= 0 or total <= limit - limit // _KEPT:
            return True
        weights = self._weights()
        if len(weights) < 2:
            return True
        total_weight = sum(weights.values())
        kept = {key: int(limit * w / total_weight / _KEPT) for key, w in weights.items()}
        held = {**self._held, owner: self._held[owner] + more}
        beyond = sum(max(0, number - kept.get(key, 0)) for key, number in held.items())
        return held[owner] <= kept.get(owner, 0) or beyond <= limit - sum(kept.values())

    def add(self, owner: str, more: int) -> None:
        """Count `more` permits of `owner`; negative ones are released."""
        self._held[owner] += more
        if not self._held[owner]:
            del self._held[owner]
