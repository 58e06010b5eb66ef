"""Executes the warm-up plan: compile or load the graphs, pack the weights, run what is new once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set

from rbln_backend.compiler.port import CompiledGraph, GraphSpec
from rbln_backend.compiler.program import Program
from rbln_backend.parallel.peers import Peers
from rbln_backend.reporting.progress import ProgressWriter
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.worker.graphs.factory import GraphFactory, GraphRequest, Result
from rbln_backend.worker.startup.phase_timer import timed_phase


class WarmUp:
    """Reports each graph on the terminal, in the progress file and in the metrics."""

    def __init__(
        self, progress: ProgressWriter, board: MetricsBoard, peers: Peers | None = None
    ) -> None:
        """``peers``: the ranks that must run the same graphs at the same time."""
        self._progress = progress
        self._board = board
        self._peers = peers or Peers(None)
        self._fresh: Set[str] = frozenset()
        self._results: dict[GraphSpec, Result] = {}

    def compile_all(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> list[CompiledGraph]:
        """Every graph of the plan, in its order; raises ``CompileError``."""
        graphs: list[CompiledGraph] = []

        def compile_here() -> Set[str]:
            graphs.extend(self._compile(requests, factory))
            return {str(spec) for spec, how in self._results.items() if how == "compiled"}

        self._fresh = self._peers.together(compile_here)
        return graphs

    def _compile(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> list[CompiledGraph]:
        with timed_phase(self._board, "compile"):
            self._plan(requests, factory)
            if factory.compiles_when_loading:
                return self._load_all(requests, factory)
            programs = factory.obtain_all(requests, self)
            self._progress.phase("compile", "packing weights")
            factory.pack_weights(programs.values())
            return [factory.bind(request, programs[request.spec]) for request in requests]

    def _load_all(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> list[CompiledGraph]:
        """For a compiler that works when it is given the tensors: a graph is done then."""
        specs = [request.spec for request in requests]
        self._progress.phase("compile", "capturing")
        programs = factory.obtain_all(requests, _Unheard())
        restored = factory.restore_binaries(specs)
        self._progress.phase("compile")
        graphs = []
        for request in requests:
            self.graph_started(request.spec)
            started = time.perf_counter()
            graphs.append(factory.bind(request, programs[request.spec]))
            result: Result = "loaded" if restored else "compiled"
            self.graph_done(request.spec, result, time.perf_counter() - started)
        if not restored:
            factory.save_binaries(specs)
        return graphs

    def obtain_all(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> dict[GraphSpec, Program]:
        """The program of every graph, from the store or captured; raises ``CompileError``."""
        self._plan(requests, factory)
        return factory.obtain_all(requests, self)

    def _plan(self, requests: Sequence[GraphRequest], factory: GraphFactory) -> None:
        self._progress.phase("compile")
        names = [str(request.spec) for request in requests]
        self._progress.plan(names, workers=factory.capture_workers)

    @property
    def results(self) -> dict[str, Result]:
        """How each graph was obtained so far."""
        return {str(spec): result for spec, result in self._results.items()}

    def run_all(self, graphs: Sequence[CompiledGraph]) -> None:
        """First run over padding only: pages are touched, threads are started.

        Of the graphs that every rank loaded the smallest of each phase runs, and the others
        prepare: they ran when they were made, and a large model's long chunks would take seconds
        here.
        """
        self._progress.phase("warmup")
        warm = set()
        with timed_phase(self._board, "warmup"):
            for graph in graphs:
                if str(graph.spec) in self._fresh or graph.spec.phase not in warm:
                    graph.run()
                else:
                    graph.prepare()
                warm.add(graph.spec.phase)

    def graph_started(self, spec: GraphSpec) -> None:
        """Tell that work on a graph begins."""
        self._progress.graph_started(str(spec))

    def graph_done(self, spec: GraphSpec, result: Result, seconds: float) -> None:
        """Tell and count a graph."""
        self._results[spec] = result
        labels = {"kind": spec.phase_name, "result": result}
        self._board.histogram("rbln_compile_seconds", **labels).observe(seconds)
        made = Counter((s.phase_name, r) for s, r in self._results.items())
        self._board.gauge("rbln_graphs", **labels).set(made[spec.phase_name, result])
        self._progress.graph_done(str(spec), result, seconds)


class _Unheard:
    """Hears of graphs whose work has only begun."""

    def graph_started(self, spec: GraphSpec) -> None:
        pass

    def graph_done(self, spec: GraphSpec, result: Result, seconds: float) -> None:
        pass
