"""`CompileProcess`: a new process that compiles graphs for an NPU beside the engine's steps.

The SDK's compiler needs no device, but a fork would share the engine's. So the process loads the
model anew, at the lowest priority, and leaves programs and binaries in the store. The engine then
takes the binaries and reads one program at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rbln_backend.core import GraphSpec
from rbln_backend.errors import CompileError
from rbln_backend.reporting.progress import ProgressReader
from rbln_backend.worker.buckets.compile_job import CompileJob
from rbln_backend.worker.buckets.graph_child import MadeProgram
from rbln_backend.worker.graphs.factory import GraphFactory, GraphRequest, Result

_LOG = "stderr.txt"


class CompileProcess:
    """Fills the store with a set of graphs, unless it has it; then loads those that are missing."""

    def __init__(
        self,
        job: CompileJob,
        factory: GraphFactory,
        missing: Sequence[GraphRequest],
        binaries: Sequence[GraphSpec],
    ) -> None:
        """``missing``: graphs to load. ``binaries``: the whole set, under which they are stored."""
        self._factory, self._binaries = factory, binaries
        self._missing = list(missing)
        self.is_running = True
        self._counts = (0, len(binaries))
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._result: Result = "loaded"
        self._has_binaries = False
        if not self._is_stored():
            self._result = "compiled"
            self._start(job)

    def receive(self) -> list[MadeProgram]:
        """Return the next program, if the process has ended; raises ``CompileError``.

        The first call after its end takes the binaries alone.
        """
        if self._process is not None:
            self._follow(self._process)
        elif not self._has_binaries:
            self._take_binaries()
        elif self._missing:
            return [self._load(self._missing.pop(0))]
        if self._has_binaries and not self._missing:
            self.close()
        return []

    @property
    def counts(self) -> tuple[int, int] | None:
        """Graphs that the process has compiled or loaded, and in all; None if it does not run."""
        return None if self._process is None else self._counts

    def close(self) -> None:
        """End the process and remove its files; idempotent."""
        self.is_running = False
        if self._process is not None:
            # With the processes of the SDK's compiler, if it has any.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._forget_process()

    def _is_stored(self) -> bool:
        programs = all(self._factory.is_stored(request.spec) for request in self._missing)
        return programs and self._factory.has_binaries(self._binaries)

    def _start(self, job: CompileJob) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rbln-buckets-"))
        self._progress = ProgressReader(self._folder)
        job.write(self._folder)
        module = "rbln_backend.worker.compile_beside"
        with (self._folder / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        code = process.poll()
        seen = self._progress.poll()
        if seen.graphs_total:
            self._counts = (seen.graphs_done, seen.graphs_total)
        if code is None:
            return
        if code:
            raise CompileError(f"compiling beside the engine failed: {self._reason(code)}")
        self._forget_process()

    def _reason(self, code: int) -> str:
        failure = self._progress.poll().failure
        if failure is not None:
            return failure
        assert self._folder is not None
        lines = (self._folder / _LOG).read_text(errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return f"exit code {code}: {said[-1] if said else 'no message'}"

    def _forget_process(self) -> None:
        self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _take_binaries(self) -> None:
        if not self._factory.restore_binaries(self._binaries):
            raise CompileError("the store lacks the binaries that were compiled for this change")
        self._has_binaries = True

    def _load(self, request: GraphRequest) -> MadeProgram:
        program = self._factory.load(request)
        if program is None:
            raise CompileError(f"the store lacks graph {request.spec}, compiled for this change")
        return MadeProgram(request.spec, program.to_bytes(), self._result)
