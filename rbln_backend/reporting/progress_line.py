"""A progress line on standard error: a bar on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
import time

_WIDTH = 24


class ProgressLine:
    """One side's progress; ``end`` leaves the last state standing."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._started = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._open = False

    def show(self, what: str, done: int, total: int) -> None:
        """``done`` of ``total`` steps of ``what``."""
        filled = _WIDTH * done // max(total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        seconds = time.monotonic() - self._started
        text = f"{self._side:>12} [{bar}] {what} {done}/{total} {seconds:.1f} s"
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K" + text)
            self._open = True
        elif done in (0, total):
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._open:
            sys.stderr.write("\n")
            self._open = False
