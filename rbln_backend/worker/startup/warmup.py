"""The warm-up: compile or load the graphs, pack the weights, run new graphs once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence, Set
from itertools import accumulate

from rbln_backend.bucketing.engine_buckets import DraftSizes
from rbln_backend.bucketing.verify import NO_DRAFTS, Size, VerifyTable
from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.compiler.programs.program import Program
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.parallel.peers import Peers
from rbln_backend.reporting.progress import ProgressWriter
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.worker.graphs.factory import GraphFactory, GraphRequest, NoListener, Result
from rbln_backend.worker.sampling.device_sampler import DeviceSampler, sampler_specs
from rbln_backend.worker.startup.phase_timer import timed_phase

_BY_TOKEN = (Phase.DECODE, Phase.VERIFY)
_MEASURING_S = 0.8


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

    def run_all(
        self, graphs: Sequence[CompiledGraph], verify: VerifyTable = NO_DRAFTS
    ) -> dict[Size, float]:
        """Run graphs over padding, which touches pages and starts threads.

        Newly compiled graphs and the smallest of each phase run. The others, loaded by every rank,
        only ``prepare``: long chunks of a large model would take seconds here. Return seconds by
        size of the steps among which the number of drafts is chosen.
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
            return self._measure(graphs, verify)

    def _measure(self, graphs: Sequence[CompiledGraph], verify: VerifyTable) -> dict[Size, float]:
        """Return the shorter of two runs of each size, smallest first, within ``_MEASURING_S``."""
        steps = {(g.spec.bucket, g.spec.length): g for g in graphs if g.spec.phase in _BY_TOKEN}
        sizes = [s for b in verify.buckets if len(verify.sizes(b)) > 1 for s in verify.sizes(b)]
        sizes.sort(key=lambda size: (size[0] * size[1], size))
        if not sizes:
            return {}
        # Every rank must run the same sizes, whatever its own times are.
        chosen = self._peers.union(lambda: _affordable(sizes, _seconds(steps[sizes[0]])))
        return {
            size: min(_seconds(steps[size]), _seconds(steps[size]))
            for size in sizes
            if _name(size) in chosen
        }

    def measure_drafting(
        self, graphs: Sequence[CompiledGraph], sizes: DraftSizes | None
    ) -> dict[int, float]:
        """Return the seconds of a draft model's graphs after a decode step, by bucket.

        Smallest first, within ``_MEASURING_S``. None without a draft model: ``sizes`` is None.
        """
        if sizes is None:
            return {}
        own = {(g.spec.bucket, g.spec.length): g for g in graphs if g.spec.phase is Phase.DRAFT}
        measured, started = dict[int, float](), time.perf_counter()

        def has_time() -> Set[str]:
            return {"yes"} if time.perf_counter() - started <= _MEASURING_S / 2 else frozenset()

        for bucket in sizes.requests:
            # Every rank must run the same sizes, whatever its own times are.
            if measured and not self._peers.union(has_time):
                break
            measured[bucket] = 0.0
            for length, runs in sizes.runs.items():
                graph = own[bucket, length]
                measured[bucket] += runs * min(_seconds(graph), _seconds(graph))
        return measured

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


def _affordable(sizes: Sequence[Size], least_s: float) -> Set[str]:
    """Return the names of the first sizes whose two runs each fit in ``_MEASURING_S``.

    At least the first one, which takes `least_s`. Estimate: steps of up to eight tokens take as
    long, larger ones in proportion to their tokens.
    """
    spent = (2 * least_s * max(1, size[0] * size[1] / 8) for size in sizes)
    within = sum(total <= _MEASURING_S for total in accumulate(spent))
    return {_name(size) for size in sizes[: max(within, 1)]}


def _name(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _seconds(graph: CompiledGraph) -> float:
    started = time.perf_counter()
    graph.run()
    return time.perf_counter() - started
