"""Seconds of the parts of a start, for its log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class StartParts:
    """Parts that follow one another; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        """Record the seconds since the end of the part before as those of `part`."""
        now = self._clock()
        self._seconds[part] = now - self._since
        self._since = now

    def line(self, inside: Mapping[str, Mapping[str, float]]) -> str:
        """Return all parts as one line; `inside` has seconds of what is inside some of them."""
        return ", ".join(
            f"{part} {seconds:.2f} s{_details(inside.get(part, {}))}"
            for part, seconds in self._seconds.items()
        )


def _details(inside: Mapping[str, float]) -> str:
    if not inside:
        return ""
    return f" ({', '.join(f'{part} {seconds:.2f}' for part, seconds in inside.items())})"
