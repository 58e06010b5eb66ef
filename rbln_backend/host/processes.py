"""Processes: jobs in a child with their progress, closed output pipes, and the end of a parent."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

from rbln_backend.errors import RblnError

if TYPE_CHECKING:
    from typing_extensions import Buffer

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


def run_child(
    module: str,
    write_job: Callable[[Path], None],
    read_result: Callable[[Path], T],
    *,
    label: str,
    variables: Mapping[str, str],
    timeout: float,
) -> T:
    """Run `python -m module JOB RESULT` with no environment but `variables`; return its result.

    Raises `ChildError` with the end of the job's log, also after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="rbln-job-") as name:
        folder = Path(name)
        job, result, log = folder / "job.json", folder / "result.npz", folder / "log.txt"
        write_job(job)
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(job), str(result)],
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Own session: processes that the child starts end with it.
                start_new_session=True,
            )
            started = time.monotonic()
            timer = threading.Timer(timeout, process.kill)
            timer.start()
            line = ProgressLine(label)
            try:
                for text in process.stdout or ():
                    if text.startswith(_PROGRESS):
                        line.show(*json.loads(text.removeprefix(_PROGRESS)))
                status = process.wait()
            finally:
                timer.cancel()
                if process.poll() is None:
                    process.kill()
                line.end()
            seconds = time.monotonic() - started
        if status != 0 or not result.is_file():
            end = f"ended with status {status}"
            if seconds >= timeout:
                end = f"took over {seconds:.0f} s"
            elif status < 0:
                names = {number.value: number.name for number in signal.Signals}
                end = f"was ended by {names.get(-status, f'signal {-status}')}"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
            raise ChildError(f"the {label} {end}:\n{tail}")
        return read_result(result)


_PR_SET_PDEATHSIG = 1
_READER_GONE = (errno.EPIPE, errno.EIO)


class _LastingFile(io.FileIO):
    """A descriptor that this process redirects to `/dev/null` once its reader closes."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return memoryview(data).nbytes


def outlive_readers() -> None:
    """Survive closed readers of standard output and error; call before logging is set up.

    Streams that are not the interpreter's own any more are left alone.
    """
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _lasting(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    file = _LastingFile(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(file), stream.encoding, stream.errors, line_buffering=True
    )


def lower_thread_priority(niceness: int = 10) -> None:
    """Make this thread give way to the engine and its kernels; Linux has a niceness per thread."""
    thread = threading.get_native_id()
    with suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def end_with_parent() -> None:
    """Kill this process when the one that started it ends, however that happens.

    For processes of `multiprocessing` alone; there the parent's end closes a pipe. The kernel's own
    signal (PR_SET_PDEATHSIG) comes too early where a thread that ended has started the process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def end_with_engine() -> None:
    """Make the kernel kill this process when the engine process ends, for any reason.

    vLLM's own watch lets a rank finish its current call, which may be a compile of minutes. The
    signal is sent at the end of the thread that started this process, the main thread of an engine
    process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        # The engine process has ended already.
        os._exit(1)
