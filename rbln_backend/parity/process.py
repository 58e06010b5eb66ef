"""Runs a side in a process of its own, in a clean environment, and shows its progress."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from rbln_backend.errors import RblnError
from rbln_backend.parity.child import PROGRESS
from rbln_backend.parity.job import Job, SideResult
from rbln_backend.parity.progress import ProgressLine

# Lines of a failed side's log that are shown.
_LOG_TAIL = 25


class SideError(RblnError):
    """A side ended without a result."""


def run_side(job: Job, environ: Mapping[str, str], timeout: float) -> SideResult:
    """Run ``job``; raises ``SideError`` with the end of its log if it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="rbln-parity-") as name:
        folder = Path(name)
        job.write(folder / "job.json")
        result, log = folder / "result.npz", folder / "log.txt"
        command = [sys.executable, "-m", "rbln_backend.parity.child"]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [*command, str(folder / "job.json"), str(result)],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Its own session: what it has started ends with it.
                start_new_session=True,
            )
            status = _follow(process, job.side, timeout)
        if status != 0 or not result.is_file():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
            raise SideError(f"the {job.side} side ended with status {status}:\n{tail}")
        return SideResult.read(result)


def _follow(process: subprocess.Popen[str], side: str, timeout: float) -> int:
    timer = threading.Timer(timeout, process.kill)
    timer.start()
    line = ProgressLine(side)
    try:
        for what, done, total in _progress(process):
            line.show(what, done, total)
        return process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        line.end()


def _progress(process: subprocess.Popen[str]) -> Iterator[tuple[str, int, int]]:
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(PROGRESS):
            what, done, total = json.loads(text.removeprefix(PROGRESS))
            yield what, done, total
