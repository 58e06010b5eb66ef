"""A bounded pool of worker processes; a process whose job exceeds its timeout is killed.

A process is started when a job finds no idle one, and is reused. Invariant: after every job its
slot is free again, with a working process or none.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
"""Memory by which a worker process may grow."""
_PROCESSES: dict[str, type[BaseProcess]] = {"forkserver": ForkServerProcess, "spawn": SpawnProcess}

StartProcess = Callable[[Connection], BaseProcess]
"""Starts a process that sends one message when it is ready, then answers jobs on the pipe."""


class JobTimeoutError(Exception):
    """The job exceeded its timeout; its process was killed."""


class JobCrashedError(Exception):
    """The process ended before it answered; the message gives its end, such as `by SIGKILL`."""


class JobSpentError(Exception):
    """The job exceeded its processor time; its process has ended."""


class WorkerStartError(Exception):
    """No process could be started."""


class PoolFullError(Exception):
    """Too many jobs are waiting."""


def process_starter(
    method: str, target: Callable[..., None], name: str, *args: Any
) -> StartProcess:
    """Return a function that starts `target(pipe, *args)` in a process by `method`."""

    def start(pipe: Connection) -> BaseProcess:
        process = _PROCESSES[method](target=target, args=(pipe, *args), name=name, daemon=True)
        process.start()
        return process

    return start


class JobPool:
    """A pool used from one event loop; `name` names its processes in the log."""

    def __init__(
        self,
        name: str,
        start: StartProcess,
        size: int,
        timeout_s: float,
        start_timeout_s: float = _START_TIMEOUT_S + _END_S,
    ) -> None:
        self.timeout_s = timeout_s
        """Seconds that a job may take."""
        self._start_timeout_s = start_timeout_s
        self._max_waiting = size * _WAITING_PER_PROCESS
        self._waiting = 0
        # One thread per slot blocks on its process.
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name.replace(" ", "-"))
        # Last in, first out: the slot used last has a warm process.
        self._slots: asyncio.LifoQueue[_WorkerSlot] = asyncio.LifoQueue()
        for _ in range(size):
            self._slots.put_nowait(_WorkerSlot(name, start))

    async def run(self, job: bytes, shares: float = 1, *, waits: bool = False) -> bytes:
        """Return the answer to a job; its timeout is `shares` times that of the pool.

        `waits` skips the limit of waiting jobs; the caller bounds them instead. Raises one of this
        module's errors.
        """
        if not waits and self._waiting >= self._max_waiting:
            raise PoolFullError
        self._waiting += 1
        try:
            slot = await self._slots.get()
        finally:
            self._waiting -= 1
        try:
            await self._ensure_started(slot)
            return await self._run_in(slot, job, shares * self.timeout_s)
        finally:
            self._slots.put_nowait(slot)

    async def start_one(self) -> None:
        """Start a process before the first job. Raises `WorkerStartError`."""
        slot = await self._slots.get()
        try:
            await self._ensure_started(slot)
        finally:
            self._slots.put_nowait(slot)

    async def _ensure_started(self, slot: _WorkerSlot) -> None:
        if slot.is_alive():
            return
        start = asyncio.get_running_loop().run_in_executor(self._threads, slot.start)
        try:
            await asyncio.wait({start}, timeout=self._start_timeout_s)
        except asyncio.CancelledError:
            # The slot is released once the process has started.
            await asyncio.wait({start}, timeout=self._start_timeout_s)
            raise
        finally:
            # Marks the exception of an abandoned start as retrieved.
            start.add_done_callback(lambda work: work.cancelled() or work.exception())
        if not start.done():
            # The fork server may be stopped; the thread continues when it is resumed.
            raise WorkerStartError(f"no process within {self._start_timeout_s:g} s")
        start.result()

    async def _run_in(self, slot: _WorkerSlot, job: bytes, timeout_s: float) -> bytes:
        loop = asyncio.get_running_loop()
        exchange = loop.run_in_executor(self._threads, slot.exchange, job)
        try:
            done, _ = await asyncio.wait({exchange}, timeout=timeout_s)
            if not done:
                raise JobTimeoutError
            return exchange.result()
        except BaseException:
            slot.kill()
            # The end of the process also ends the thread's wait.
            await asyncio.wait({exchange})
            with suppress(JobCrashedError, JobSpentError):
                exchange.result()
            raise


class _WorkerSlot:
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
        near_end, far_end = Pipe()
        try:
            self._process = self._start(far_end)
        except OSError as error:
            near_end.close()
            raise WorkerStartError(str(error)) from error
        finally:
            far_end.close()
        self._pipe = near_end
        with suppress(EOFError, OSError):
            if near_end.poll(_START_TIMEOUT_S):
                near_end.recv_bytes()
                logger.info("started process %s: %s", self._process.pid, self._name)
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
            process = self._process
            if process is None:
                raise JobCrashedError("by this server") from None
            process.join(_END_S)
            code = process.exitcode
            if code == -signal.SIGPROF:
                raise JobSpentError from None
            reason = f"with exit code {code}"
            with suppress(ValueError):
                if code is not None and code < 0:
                    reason = f"by {signal.Signals(-code).name}"
            raise JobCrashedError(reason) from None

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()


def limit_processor_time(seconds: float) -> None:
    """End the calling process with SIGPROF after `seconds` of processor time; 0: no limit.

    User and kernel time count, waiting for a busy processor does not.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


@contextmanager
def uncounted_processor_time() -> Iterator[None]:
    """Stop the clock of `limit_processor_time` in the block."""
    left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, left)


def limit_growth() -> None:
    """Limit the calling process's memory growth to `MEMORY_BYTES`; larger jobs fail alone."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


# Results and durations of jobs, for the metrics.

GRAMMAR_RESULTS = tuple("ok known refused spent timeout crashed overloaded not_started".split())
"""Results of grammar checks, the label of their metric."""
READING_RESULTS = ("ok", "refused", "timeout", "crashed", "overloaded", "not_started")
"""Results of reading large bodies, the label of their metric."""
_MAX_DURATIONS = 4096


class JobCounts:
    """Results and durations of jobs since the last scrape."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter()
        # Bounded, in case /metrics is never scraped.
        self.seconds: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self.sizes: deque[int] = deque(maxlen=_MAX_DURATIONS)

    def note(self, result: str, seconds: float | None = None, size: int | None = None) -> None:
        """Count a job's result, its duration if it ran, and the bytes of what it made."""
        self.results[result] += 1
        if seconds is not None:
            self.seconds.append(seconds)
        if size is not None:
            self.sizes.append(size)
