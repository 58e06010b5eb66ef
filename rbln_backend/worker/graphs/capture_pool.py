"""Graphs captured in forked children, one per core: Dynamo is Python and uses one core.

A child inherits the loaded model, sends programs as bytes and exits without the parent's exit
handlers. If a child dies, the parent lacks the graphs that it did not send, and those that are
queued afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from rbln_backend.compiler.port import Compiler
from rbln_backend.core import GraphSpec
from rbln_backend.vllm_compat.surface import init_logger

logger = init_logger(__name__)

_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 120.0
_INDEX = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Captured:
    """A program's bytes and the seconds of its capture."""

    spec: GraphSpec
    data: bytes
    seconds: float


class CaptureQueue:
    """Pipe of the numbers of graphs to capture; children take the next one when they are idle.

    It closes when every queued graph is done.
    """

    def __init__(self, specs: Sequence[GraphSpec]) -> None:
        """``specs``: all graphs that may be queued, as numbered in the pipe."""
        self.specs = list(specs)
        self._queued: set[GraphSpec] = set()
        self._open = 0
        self.reader, self._writer = os.pipe()
        self._is_closed = False

    def add(self, specs: Iterable[GraphSpec]) -> None:
        """Queue those of ``specs`` that never were; too late after ``close``."""
        for spec in specs:
            if spec not in self._queued and not self._is_closed:
                self._queued.add(spec)
                self._open += 1
                os.write(self._writer, _INDEX.pack(self.specs.index(spec)))

    def done(self) -> None:
        """Count a queued graph as delivered."""
        self._open -= 1
        if not self._open:
            self.close()

    def close(self) -> None:
        """Let children exit after the graphs that are queued."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._writer)


def workers_of(compiler: Compiler, local_ranks: int) -> int:
    """Return a rank's share of the cores, 1 for the SDK: its compiler may not survive a fork."""
    if not compiler.capabilities.runs_on_host:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def capture_in_children(
    queue: CaptureQueue,
    capture: Callable[[GraphSpec], bytes],
    *,
    workers: int,
    on_start: Callable[[GraphSpec], None],
    timeout_s: float = _TIMEOUT_S,
) -> Generator[Captured, None, None]:
    """Capture the graphs of ``queue`` in ``workers`` forked children and yield each when done.

    The caller may queue more graphs until it asks for the next one. A graph is left out if its
    capture fails, if its child dies, or if no child sends anything for ``timeout_s`` seconds;
    nothing is raised.
    """
    children: dict[Connection, int] = {}
    try:
        for _ in range(min(workers, len(queue.specs))):
            reader, writer = Pipe(duplex=False)
            children[reader] = _fork(queue, writer, capture)
            writer.close()
        yield from _collect(list(children), queue, on_start, timeout_s)
    finally:
        queue.close()
        os.close(queue.reader)
        for reader, pid in children.items():
            reader.close()
            _end(pid)


def _fork(queue: CaptureQueue, writer: Connection, capture: Callable[[GraphSpec], bytes]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # No signal handler and no exit hook of the parent may run here.
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Else this child would keep the queue open for all of them.
        queue.close()
        _work(queue, writer, capture)
    except BaseException:
        logger.exception("A graph is captured again by the engine process")
    finally:
        os._exit(0)


def _work(queue: CaptureQueue, writer: Connection, capture: Callable[[GraphSpec], bytes]) -> None:
    while record := os.read(queue.reader, _INDEX.size):
        (index,) = _INDEX.unpack(record)
        writer.send((index, 0.0, None))
        started = time.perf_counter()
        data = capture(queue.specs[index])
        writer.send((index, time.perf_counter() - started, data))


def _collect(
    readers: list[Connection],
    queue: CaptureQueue,
    on_start: Callable[[GraphSpec], None],
    timeout_s: float,
) -> Iterator[Captured]:
    while readers:
        ready = wait(readers, timeout_s)
        if not ready:
            logger.warning(
                "No child has captured a graph for %.0f s: the engine captures the rest", timeout_s
            )
            return
        for reader in ready:
            assert isinstance(reader, Connection)
            try:
                index, seconds, data = reader.recv()
            except (EOFError, OSError):
                readers.remove(reader)
                # What a lost child has taken is never done: the others must not wait for it.
                queue.close()
                continue
            if data is None:
                on_start(queue.specs[index])
            else:
                yield Captured(queue.specs[index], data, seconds)
                queue.done()


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
