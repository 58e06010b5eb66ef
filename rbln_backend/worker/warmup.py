"""Executes the warm-up plan: compile or load each graph, then run it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rbln_backend.compiler.port import CompiledGraph, GraphSpec
from rbln_backend.progress import ProgressWriter
from rbln_backend.stats import MetricsBoard
from rbln_backend.worker.phase_timer import timed_phase

Build = Callable[[GraphSpec], tuple[CompiledGraph, str, float]]


class WarmUp:
    """Reports each graph on the terminal, in the progress file and in the metrics."""

    def __init__(self, progress: ProgressWriter, board: MetricsBoard) -> None:
        self._progress = progress
        self._board = board
        self._made: dict[tuple[str, str], int] = {}

    def compile_all(self, specs: Sequence[GraphSpec], build: Build) -> list[CompiledGraph]:
        """Every graph of the plan, in order; raises ``CompileError``."""
        self._progress.phase("compile")
        self._progress.plan([str(spec) for spec in specs])
        with timed_phase(self._board, "compile"):
            return [self._make(spec, build) for spec in specs]

    def run_all(self, graphs: Sequence[CompiledGraph]) -> None:
        """First run of each graph over padding only: pages are touched, threads are started."""
        self._progress.phase("warmup")
        with timed_phase(self._board, "warmup"):
            for graph in graphs:
                graph.run()

    def _make(self, spec: GraphSpec, build: Build) -> CompiledGraph:
        self._progress.graph_started(str(spec))
        graph, result, seconds = build(spec)
        self._record(spec, result, seconds)
        self._progress.graph_done(str(spec), result, seconds)
        return graph

    def _record(self, spec: GraphSpec, result: str, seconds: float) -> None:
        labels = {"kind": spec.phase_name, "result": result}
        self._board.histogram("rbln_compile_seconds", **labels).observe(seconds)
        self._made[labels["kind"], result] = self._made.get((labels["kind"], result), 0) + 1
        self._board.gauge("rbln_graphs", **labels).set(self._made[labels["kind"], result])
