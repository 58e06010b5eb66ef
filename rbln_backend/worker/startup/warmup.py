"""The warm-up: compile or load the graphs, pack the weights, run new graphs once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set

from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.compiler.programs.program import Program
from rbln_backend.core import GraphSpec
from rbln_backend.parallel.peers import Peers
from rbln_backend.reporting.progress import ProgressWriter
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.worker.graphs.factory import GraphFactory, GraphRequest, NoListener, Result
from rbln_backend.worker.sampling.device_sampler import DeviceSampler, sampler_specs
from rbln_backend.worker.startup.phase_timer import timed_phase


class WarmUp:
    """Reports each graph on the terminal, in the progress file and in the metrics."""

    def __init__(
        self,
        progress: ProgressWriter,
        board: MetricsBoard,
        peers: Peers | None = None,
        draws: DeviceSampler | None = None,
    ) -> None:
        """``peers``: the ranks that must run the same graphs, None for a single rank.

        ``draws``: the sampler whose graphs are compiled after the model's.
        """
        self._progress = progress
        self._board = board
        self._peers = peers or Peers(None)
        self._draws = draws
        self._fresh: Set[str] = frozenset()
        self._results: dict[GraphSpec, Result] = {}

    def compile_all(
        self, requests: Sequence[GraphRequest], factory: GraphFactory
    ) -> list[CompiledGraph]:
        """Return every graph of the plan, in its order; raises ``CompileError``."""
        graphs: list[CompiledGraph] = []

        def compile_here() -> Set[str]:
            graphs.extend(self._compile(requests, factory))
            return {str(spec) for spec, how in self._results.items() if how == "compiled"}

        self._fresh = self._peers.union(compile_here)
        if self._draws is not None:
            self._draws.compile(graphs, factory, self)
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
        """Make the graphs with a compiler that compiles when it loads a program."""
        specs = [request.spec for request in requests]
        self._progress.phase("compile", "capturing")
        programs = factory.obtain_all(requests, NoListener())
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
        """Return the program of every graph, loaded or captured; raises ``CompileError``."""
        self._plan(requests, factory)
        return factory.obtain_all(requests, self)

    def _plan(self, requests: Sequence[GraphRequest], factory: GraphFactory) -> None:
        self._progress.phase("compile")
        specs = [request.spec for request in requests]
        if self._draws is not None:
            specs += sampler_specs(specs)
        self._progress.plan([str(spec) for spec in specs], workers=factory.capture_workers)

    @property
    def results(self) -> dict[str, Result]:
        """ "compiled" or "loaded" for each graph obtained so far."""
        return {str(spec): result for spec, result in self._results.items()}

    def run_all(self, graphs: Sequence[CompiledGraph]) -> None:
        """Run graphs over padding, which touches pages and starts threads.

        Newly compiled graphs and the smallest of each phase run. The others, loaded by every rank,
        only ``prepare``: long chunks of a large model would take seconds here.
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
        """Report that the capture or load of a graph begins."""
        self._progress.graph_started(str(spec))

    def graph_done(self, spec: GraphSpec, result: Result, seconds: float) -> None:
        """Report and count a graph."""
        self._results[spec] = result
        labels = {"kind": spec.phase_name, "result": result}
        self._board.histogram("rbln_compile_seconds", **labels).observe(seconds)
        made = Counter((s.phase_name, r) for s, r in self._results.items())
        self._board.gauge("rbln_graphs", **labels).set(made[spec.phase_name, result])
        self._progress.graph_done(str(spec), result, seconds)
