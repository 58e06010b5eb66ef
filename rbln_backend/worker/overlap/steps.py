"""Graphs that run while the engine plans the next step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.core import StepBatch, UsefulRows
from rbln_backend.worker.step.graph_set import StepGraph
from rbln_backend.worker.step.runner import StepRunner


class EndedRun(NamedTuple):
    """A run of a graph that the device has ended."""

    outputs: tuple[Tensor, ...]
    seconds: float
    """From the launch to the end."""


Wait = Callable[[], EndedRun]
Launch = Callable[[CompiledGraph, UsefulRows | None], Wait]
"""Starts ``CompiledGraph.run`` and returns a function that waits for its end."""


def launch_on_device(graph: CompiledGraph, useful: UsefulRows | None) -> Wait:
    """Launch a graph of a device beside the host; its call may return before the device ends.

    The end is known by reading the picked tokens, the last output, int32 [rows].
    """
    started = time.perf_counter()
    outputs = graph.run(useful)

    def wait() -> EndedRun:
        outputs[-1].cpu()
        return EndedRun(outputs, time.perf_counter() - started)

    return wait


class LaunchInThread:
    """Launches graphs of the emulated device in a thread; kernels leave the interpreter free."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emulated-device")

    def __call__(self, graph: CompiledGraph, useful: UsefulRows | None) -> Wait:
        """As ``Launch``."""
        return self._thread.submit(_timed, graph, useful).result


def _timed(graph: CompiledGraph, useful: UsefulRows | None) -> EndedRun:
    started = time.perf_counter()
    outputs = graph.run(useful)
    return EndedRun(outputs, time.perf_counter() - started)


class LateOutputs(Sequence[Tensor]):
    """The outputs of a run, each [...]; reading one waits for the end of the run."""

    def __init__(self, wait: Wait, ended: Callable[[float], None]) -> None:
        """``ended`` is called once, with the seconds of the run."""
        self._wait, self._ended = wait, ended
        self._outputs: tuple[Tensor, ...] | None = None

    def wait(self) -> tuple[Tensor, ...]:
        """Return the outputs [...] after the end of the run."""
        if self._outputs is None:
            self._outputs, seconds = self._wait()
            self._ended(seconds)
        return self._outputs

    def __getitem__(self, number: Any) -> Any:
        return self.wait()[number]

    def __len__(self) -> int:
        return len(self.wait())


class OverlappedStepRunner(StepRunner):
    """A step runner whose graphs may still run when a step returns; one step at a time."""

    def __init__(self, *, launch: Launch, **parts: Any) -> None:
        """``parts``: those of ``StepRunner``, of an engine without pipeline stages."""
        super().__init__(**parts)
        self._launch = launch
        self._late: LateOutputs | None = None

    def wait(self) -> None:
        """Wait for the end of the latest step; count its time."""
        late, self._late = self._late, None
        if late is not None:
            late.wait()

    def _run(self, step: StepGraph, batch: StepBatch | None) -> Sequence[Tensor]:
        """Launch a graph for ``batch``; its time is counted by ``wait``."""
        wait = self._launch(step.graph, self._useful(batch))
        self._late = LateOutputs(wait, partial(self._count, step, batch))
        return self._late
