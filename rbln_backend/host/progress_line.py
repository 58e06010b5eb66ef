"""Progress line on standard error: a bar on a terminal, else a line per tenth of a stage."""

from __future__ import annotations

import sys
import time

_WIDTH = 24


class ProgressLine:
    """Progress of one side by stage; ``end`` keeps the last state on the terminal."""

    def __init__(self, side: str) -> None:
        self._side = side
        self._is_terminal = sys.stderr.isatty()
        self._open = False
        self._stage: str | None = None
        self._began, self._before = 0.0, 0
        self._tenth = -1

    def show(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show ``done`` of ``total`` steps of a stage, followed by ``note``."""
        if stage != self._stage:
            self._stage, self._tenth = stage, -1
            self._began, self._before = time.monotonic(), done
        total = max(total, 1)
        filled = _WIDTH * done // total
        bar = "#" * filled + "." * (_WIDTH - filled)
        text = f"{self._side:>12} [{bar}] {stage} {done}/{total}{note}{self._times(done, total)}"
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K" + text)
            self._open = True
        elif (tenth := 10 * done // total) != self._tenth:
            self._tenth = tenth
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._open:
            sys.stderr.write("\n")
            self._open = False

    def _times(self, done: int, total: int) -> str:
        seconds = time.monotonic() - self._began
        if done <= self._before or done == total:
            return f", {seconds:.1f} s"
        left = seconds / (done - self._before) * (total - done)
        return f", {seconds:.1f} s, ETA {left:.0f} s"
