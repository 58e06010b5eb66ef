"""A job in a child process: files for the job and the result, progress on standard output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rbln_backend.errors import RblnError
from rbln_backend.host.progress_line import ProgressLine

T = TypeVar("T")
Report = Callable[[str, int, int], None]
"""Callback with a stage, and its done and total steps."""

_PROGRESS = "@progress "
# Lines of a failed job's log that are shown.
_LOG_TAIL = 25


class ChildError(RblnError):
    """A job ended without a result."""


def report(what: str, done: int, total: int) -> None:
    """Report progress from the child to the parent process."""
    print(_PROGRESS + json.dumps([what, done, total]), flush=True)  # noqa: T201


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildJob:
    """`python -m module JOB RESULT` with no environment but `variables`, for `timeout` seconds."""

    label: str
    module: str
    variables: Mapping[str, str]
    timeout: float

    def run(self, write_job: Callable[[Path], None], read_result: Callable[[Path], T]) -> T:
        """Return the result; raises `ChildError` with the end of the job's log."""
        with tempfile.TemporaryDirectory(prefix="rbln-job-") as name:
            folder = Path(name)
            job, result, log = folder / "job.json", folder / "result.npz", folder / "log.txt"
            write_job(job)
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", self.module, str(job), str(result)],
                    env=dict(self.variables),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    # Own session: processes that the child starts end with it.
                    start_new_session=True,
                )
                started = time.monotonic()
                status = self._follow(process)
                seconds = time.monotonic() - started
            if status != 0 or not result.is_file():
                end = _in_words(status) if seconds < self.timeout else f"took over {seconds:.0f} s"
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
                raise ChildError(f"the {self.label} {end}:\n{tail}")
            return read_result(result)

    def _follow(self, process: subprocess.Popen[str]) -> int:
        timer = threading.Timer(self.timeout, process.kill)
        timer.start()
        line = ProgressLine(self.label)
        try:
            for what, done, total in _progress(process):
                line.show(what, done, total)
            return process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                process.kill()
            line.end()


def _in_words(status: int) -> str:
    """Describe an exit status; a negative one is a signal number."""
    if status >= 0:
        return f"ended with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-status, f'signal {-status}')}"


def _progress(process: subprocess.Popen[str]) -> Iterator[tuple[str, int, int]]:
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(_PROGRESS):
            what, done, total = json.loads(text.removeprefix(_PROGRESS))
            yield what, done, total
