"""Child processes in their own sessions, stopped with their children while not measured."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class SleepingProcess(ABC):
    """Stopped (SIGSTOP) outside ``awake``; ends when the ``with`` block does.

    `side` is a `Side` or a `ServerSide`; `log` has to be set before the start.
    """

    side: Any
    log: Path
    _process: subprocess.Popen[bytes]

    @abstractmethod
    def __enter__(self) -> Self:
        """Start the process, wait until it is ready and stop it."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Continue the processes inside the ``with`` block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    @abstractmethod
    def _end(self) -> None:
        """End the process and all below it, asleep or not."""
