"""`GraphChild`: a forked process that makes the programs of graphs beside the engine's steps.

It inherits the loaded model, runs at the lowest priority on one core, and sends each program
through a pipe, which the engine reads between two steps without waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import signal
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from rbln_backend.core import GraphSpec
from rbln_backend.errors import CompileError
from rbln_backend.vllm_compat.surface import init_logger
from rbln_backend.worker.graphs.factory import ObtainedProgram, Result

logger = init_logger(__name__)

_PR_SET_PDEATHSIG = 1
_NICENESS = 19
_PIPE_BYTES = 1 << 20
# Number of the graph, kind of the message, bytes that follow.
_HEAD = struct.Struct("=IBI")
_RESULTS: tuple[Result, ...] = ("loaded", "compiled")
_FAILED = len(_RESULTS)


class ProgramSource(Protocol):
    """Where a change gets its programs from, beside the steps."""

    is_running: bool
    """False once all programs have come."""

    @property
    def counts(self) -> tuple[int, int] | None:
        """Graphs done and in all, where the source has counts of its own."""
        ...

    def receive(self) -> list[MadeProgram]:
        """Return the programs that came since the last call, without waiting.

        Raises ``CompileError``.
        """
        ...

    def close(self) -> None:
        """Stop and free what is beside the engine; idempotent."""
        ...


class MadeProgram(NamedTuple):
    """The bytes of a graph's program."""

    spec: GraphSpec
    data: bytes
    result: Result


class GraphChild:
    """A child that makes the programs of `specs`; `receive` returns them as they come."""

    counts = None

    def __init__(
        self, specs: Sequence[GraphSpec], make: Callable[[], Iterable[ObtainedProgram]]
    ) -> None:
        """`make` runs in the child."""
        self._specs = list(specs)
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        # The child waits at a full pipe until the engine reads.
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._pid = os.fork()
        if not self._pid:
            self._work(writer, make)
        os.close(writer)
        self._received = bytearray()
        self.is_running = True

    def receive(self) -> list[MadeProgram]:
        """Return the programs that came since the last call; raises `CompileError`.

        `is_running` is false once all of them have come.
        """
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._reader, _PIPE_BYTES):
                self._received += part
            # End of the pipe: the child has exited.
            self.is_running = False
        programs = list(self._take())
        if not self.is_running:
            self.close()
        return programs

    def _take(self) -> Iterable[MadeProgram]:
        while len(self._received) >= _HEAD.size:
            number, kind, size = _HEAD.unpack_from(self._received)
            end = _HEAD.size + size
            if len(self._received) < end:
                return
            data = bytes(self._received[_HEAD.size : end])
            del self._received[:end]
            if kind == _FAILED:
                raise CompileError(data.decode(errors="replace"))
            yield MadeProgram(self._specs[number], data, _RESULTS[kind])

    def close(self) -> None:
        """End the child and free its pipe; idempotent."""
        if self._pid:
            os.close(self._reader)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
        self._pid, self.is_running = 0, False

    def _work(self, writer: int, make: Callable[[], Iterable[ObtainedProgram]]) -> None:
        """Make the programs in the child and exit; no handler or exit hook of the parent runs."""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
            # A collection would touch, and so copy, every page with objects of the parent.
            gc.freeze()
            for made in make():
                number, kind = self._specs.index(made.spec), _RESULTS.index(made.result)
                _write(writer, number, kind, made.program.to_bytes())
        except BaseException as error:
            logger.exception("The child that makes graphs beside the steps failed")
            _write(writer, 0, _FAILED, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)


def _write(writer: int, number: int, kind: int, data: bytes) -> None:
    rest = memoryview(_HEAD.pack(number, kind, len(data)) + data)
    while rest:
        rest = rest[os.write(writer, rest) :]
