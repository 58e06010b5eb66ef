"""A bounded pool of worker processes, each of which is killed when a job takes too long.

A process is started when there is work for it and none is idle, and stays. Invariant: however a
job ends, its place in the pool is free again, with a process that works or none.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_END_S = 5.0
_WAITING_PER_PROCESS = 8
MEMORY_BYTES = 2 << 30
"""What a worker process may grow by."""
_PROCESSES: dict[str, type[BaseProcess]] = {
    "forkserver": ForkServerProcess,
    "spawn": SpawnProcess,
}

StartProcess = Callable[[Connection], BaseProcess]
"""Starts a process that answers jobs on its end of the pipe, after a first message."""


class JobTimeoutError(Exception):
    """The job took too long; its process was killed."""


class JobCrashedError(Exception):
    """The process ended before it had answered; the message says how, as `by SIGKILL`."""


class JobSpentError(Exception):
    """The job took more processor time than it may; its process is gone."""


class WorkerStartError(Exception):
    """No process could be started."""


class PoolFullError(Exception):
    """Too many jobs wait already."""


def process_starter(
    method: str, target: Callable[..., None], name: str, *args: Any
) -> StartProcess:
    """Return what starts `target(pipe, *args)` in a process, the way the engine's is started."""

    def start(pipe: Connection) -> BaseProcess:
        process = _PROCESSES[method](target=target, args=(pipe, *args), name=name, daemon=True)
        process.start()
        return process

    return start


class JobPool:
    """Used from one event loop; `name` is that of its processes in the log."""

    def __init__(
        self,
        name: str,
        start: StartProcess,
        size: int,
        timeout_s: float,
        start_timeout_s: float = _START_TIMEOUT_S + _END_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._max_waiting = size * _WAITING_PER_PROCESS
        self._waiting = 0
        # A thread per place waits for its process, so that the event loop does not.
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name.replace(" ", "-"))
        # The last to come back is the next to go: its process is started and warm.
        self._places: asyncio.LifoQueue[_Place] = asyncio.LifoQueue()
        for _ in range(size):
            self._places.put_nowait(_Place(name, start))

    @property
    def timeout_s(self) -> float:
        """Seconds that a job may take."""
        return self._timeout_s

    async def run(self, job: bytes, shares: int = 1, *, waits: bool = False) -> bytes:
        """Return the answer to a job, which may take the time of `shares` jobs.

        One that `waits` is not refused for those that wait already; its caller bounds them. Raises
        one of this module's errors.
        """
        if not waits and self._waiting >= self._max_waiting:
            raise PoolFullError
        self._waiting += 1
        try:
            place = await self._places.get()
        finally:
            self._waiting -= 1
        try:
            await self._ensure_started(place)
            return await self._run_in(place, job, shares * self._timeout_s)
        finally:
            self._places.put_nowait(place)

    async def start_one(self) -> None:
        """Have a process ready before there is work for it. Raises `WorkerStartError`."""
        place = await self._places.get()
        try:
            await self._ensure_started(place)
        finally:
            self._places.put_nowait(place)

    async def _ensure_started(self, place: _Place) -> None:
        if place.is_alive():
            return
        start = asyncio.get_running_loop().run_in_executor(self._threads, place.start)
        try:
            await asyncio.wait({start}, timeout=self._start_timeout_s)
        except asyncio.CancelledError:
            # The place is given back when the process is there.
            await asyncio.wait({start}, timeout=self._start_timeout_s)
            raise
        finally:
            start.add_done_callback(_look_at)
        if not start.done():
            # As while the fork server is stopped; its thread goes on when that does.
            raise WorkerStartError(f"no process within {self._start_timeout_s:g} s")
        start.result()

    async def _run_in(self, place: _Place, job: bytes, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        exchange = loop.run_in_executor(self._threads, place.exchange, job)
        try:
            done, _ = await asyncio.wait({exchange}, timeout=timeout_s)
            if not done:
                raise JobTimeoutError
            return exchange.result()
        except BaseException:
            place.kill()
            # With its process the wait in the thread ends too.
            await asyncio.wait({exchange})
            with suppress(JobCrashedError, JobSpentError):
                exchange.result()
            raise


def _look_at(work: asyncio.Future[None]) -> None:
    """Take the exception of work that nothing waits for any more."""
    if not work.cancelled():
        work.exception()


class _Place:
    """Room for one process."""

    def __init__(self, name: str, start: StartProcess) -> None:
        self._name = name
        self._start = start
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Start a process and wait until it is ready. Blocks."""
        self.kill()
        if self._pipe is not None:
            self._pipe.close()
        ours, theirs = Pipe()
        try:
            self._process = self._start(theirs)
        except OSError as error:
            ours.close()
            raise WorkerStartError(str(error)) from error
        finally:
            theirs.close()
        self._pipe = ours
        with suppress(EOFError, OSError):
            if ours.poll(_START_TIMEOUT_S):
                ours.recv_bytes()
                logger.info("process %s is there for: %s", self._process.pid, self._name)
                return
        self.kill()
        raise WorkerStartError(f"the process for {self._name} did not get ready")

    def exchange(self, job: bytes) -> bytes:
        """Send a job and wait for the answer. Blocks until then or until the process ends."""
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(job)
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise self._end() from None

    def _end(self) -> Exception:
        """Return why the process is gone."""
        process = self._process
        if process is None:
            return JobCrashedError("by this server")
        process.join(_END_S)
        if process.exitcode == -signal.SIGPROF:
            return JobSpentError()
        return JobCrashedError(_how(process.exitcode))

    def kill(self) -> None:
        """End the process, whatever it is at; does not wait for its end."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()


def _how(exit_code: int | None) -> str:
    """Return how a process ended, from its exit code."""
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"by {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}"


def limit_processor_time(seconds: float) -> None:
    """Let the calling process take so much from now on, in user code and the kernel; 0: no limit.

    What takes more ends it with SIGPROF. The time of others on a busy machine is not counted.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_growth() -> None:
    """Let the calling worker process grow by `MEMORY_BYTES`; a job that needs more fails alone."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
