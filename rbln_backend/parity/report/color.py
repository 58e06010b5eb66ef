"""Colours of the terminal report, by how good a value is."""

from __future__ import annotations

import math

_CODES = {"green": "32", "yellow": "33", "red": "31", "bold": "1"}


class Paint:
    """Adds ANSI codes, or none."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def __call__(self, text: str, color: str) -> str:
        return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if self._enabled else text

    def pearson(self, value: float) -> str:
        """The documented steps: green from 0.999, yellow from 0.99."""
        text = "nan" if math.isnan(value) else f"{value:.6f}"
        if value >= 0.999:
            return self(text, "green")
        return self(text, "yellow" if value >= 0.99 else "red")
