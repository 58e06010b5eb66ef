"""Graphs captured in forked children, one per core: Dynamo is Python and uses one core.

A child inherits the loaded model, sends programs as bytes and exits without the parent's exit
handlers. If a child dies, the parent lacks the graphs that it did not send.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from rbln_backend.compiler.port import Compiler
from rbln_backend.core import GraphSpec
from rbln_backend.vllm_compat.surface import init_logger

logger = init_logger(__name__)

_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 120.0
_LEAST_WORK = 0.01
"""Processor seconds per second of a child that captures, on however many shared cores."""
_INDEX = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Captured:
    """A program's bytes and the seconds of its capture."""

    spec: GraphSpec
    data: bytes
    seconds: float


def workers_of(compiler: Compiler, local_ranks: int) -> int:
    """Return a rank's share of the cores, 1 for the SDK: its compiler may not survive a fork."""
    if not compiler.capabilities.runs_on_host:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def capture_in_children(
    specs: Sequence[GraphSpec],
    capture: Callable[[GraphSpec], bytes],
    *,
    workers: int,
    on_start: Callable[[GraphSpec], None],
    timeout_s: float = _TIMEOUT_S,
) -> Generator[Captured, None, None]:
    """Capture ``specs`` in ``workers`` forked children and yield each when done.

    A graph is left out if its capture fails, if its child dies, or if its child neither sends
    anything nor computes for ``timeout_s`` seconds; nothing is raised.
    """
    queue = _filled_queue(len(specs))
    children: dict[Connection, int] = {}
    try:
        for _ in range(min(workers, len(specs))):
            reader, writer = Pipe(duplex=False)
            children[reader] = _fork(partial(_work, queue, specs, writer, capture))
            writer.close()
        yield from _collect(children, specs, on_start, timeout_s)
    finally:
        os.close(queue)
        for reader, pid in children.items():
            reader.close()
            _end(pid)


def _filled_queue(count: int) -> int:
    """Return the reading end of a pipe with the numbers below ``count`` and then end of file.

    Each child takes the next number when it is idle.
    """
    reader, writer = os.pipe()
    os.write(writer, b"".join(_INDEX.pack(index) for index in range(count)))
    os.close(writer)
    return reader


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # No signal handler and no exit hook of the parent may run here.
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        work()
    except BaseException:
        logger.exception("A graph is captured again by the engine process")
    finally:
        os._exit(0)


def _work(
    queue: int,
    specs: Sequence[GraphSpec],
    writer: Connection,
    capture: Callable[[GraphSpec], bytes],
) -> None:
    while record := os.read(queue, _INDEX.size):
        (index,) = _INDEX.unpack(record)
        writer.send((index, 0.0, None))
        started = time.perf_counter()
        data = capture(specs[index])
        writer.send((index, time.perf_counter() - started, data))


def _collect(
    children: Mapping[Connection, int],
    specs: Sequence[GraphSpec],
    on_start: Callable[[GraphSpec], None],
    timeout_s: float,
) -> Iterator[Captured]:
    # When each child was last known to work, and its processor time then.
    worked = {reader: (time.monotonic(), _cpu_s(pid)) for reader, pid in children.items()}
    while worked:
        first = min(at for at, _ in worked.values())
        ready = wait(list(worked), max(0.0, first + timeout_s - time.monotonic()))
        for reader in children.keys() & ready:
            try:
                index, seconds, data = reader.recv()
            except (EOFError, OSError):
                del worked[reader]
                continue
            worked[reader] = time.monotonic(), _cpu_s(children[reader])
            if data is None:
                on_start(specs[index])
            else:
                yield Captured(specs[index], data, seconds)
        for reader, (at, cpu_s) in list(worked.items()):
            waited_s = time.monotonic() - at
            if reader in ready or waited_s < timeout_s:
                continue
            now_s = _cpu_s(children[reader])
            worked[reader] = time.monotonic(), now_s
            if now_s - cpu_s < waited_s * _LEAST_WORK:
                logger.warning(
                    "A child has not computed for %.0f s: the engine captures its graph", waited_s
                )
                del worked[reader]
                os.kill(children[reader], signal.SIGKILL)


def _cpu_s(pid: int) -> float:
    """Return the processor time of a child that has not been waited for."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
