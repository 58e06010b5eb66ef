"""Executes the warm-up plan: compile or load each graph, then run it once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rbln_backend.compiler.port import CompiledGraph, GraphSpec
from rbln_backend.progress import ProgressWriter
from rbln_backend.stats import MetricsBoard

Build = Callable[[GraphSpec], tuple[CompiledGraph, str, float]]


class WarmUp:
    """Reports each graph on the terminal, in the progress file and in the metrics."""

    def __init__(self, progress: ProgressWriter, board: MetricsBoard) -> None:
        self._progress = progress
        self._board = board
        self._made: dict[tuple[str, str], int] = {}

    def compile_all(self, specs: Sequence[GraphSpec], build: Build) -> list[CompiledGraph]:
        """Every graph of the plan, in order; raises ``CompileError``."""
        started = time.perf_counter()
        self._progress.phase("compile")
        self._progress.plan([str(spec) for spec in specs])
        graphs = []
        for spec in specs:
            self._progress.graph_started(str(spec))
            graph, result, seconds = build(spec)
            self.record(spec, result, seconds)
            self._progress.graph_done(str(spec), result, seconds)
            graphs.append(graph)
        self._finish("compile", started)
        return graphs

    def run_all(self, graphs: Sequence[CompiledGraph]) -> None:
        """First run of each graph over padding only: pages are touched, threads are started."""
        started = time.perf_counter()
        self._progress.phase("warmup")
        for graph in graphs:
            graph.run()
        self._finish("warmup", started)

    def record(self, spec: GraphSpec, result: str, seconds: float) -> None:
        labels = {"kind": spec.phase_name, "result": result}
        self._board.histogram("rbln_compile_seconds", **labels).observe(seconds)
        self._made[labels["kind"], result] = self._made.get((labels["kind"], result), 0) + 1
        self._board.gauge("rbln_graphs", **labels).set(self._made[labels["kind"], result])

    def _finish(self, phase: str, started: float) -> None:
        seconds = time.perf_counter() - started
        self._board.gauge("rbln_startup_phase_seconds", phase=phase).set(seconds)
