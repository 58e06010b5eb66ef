"""`BucketChange`: replaces the compiled sizes of a running engine, in slices between steps."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from rbln_backend.bucketing.engine_buckets import EngineBuckets
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.compiler.programs.program import Program
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.vllm_compat.surface import init_logger
from rbln_backend.worker.buckets.graph_child import GraphChild, MadeProgram
from rbln_backend.worker.graphs.factory import (
    GraphFactory,
    GraphRequest,
    NoListener,
    ObtainedProgram,
    Result,
)
from rbln_backend.worker.step.graph_set import GraphSet, StepGraph
from rbln_backend.worker.step.inputs import StepInputs

logger = init_logger(__name__)


class ServedGraphs(NamedTuple):
    """The graphs of a running engine, and what makes others."""

    graphs: GraphSet
    factory: GraphFactory


class TakeSizes(Protocol):
    """Passes other sizes to every part of the engine that chooses among them."""

    def __call__(self, sizes: EngineBuckets) -> None:
        """Take `sizes` from the next step on."""
        ...


class BucketChange:
    """One change, from the missing programs to the swap.

    Each call of `advance` does one piece of work between two steps: it parses and binds one
    program, or runs one graph over padding, or swaps. Programs come from a child, which is forked
    only where graphs are missing. Until the swap no step sees any of this, and a failure leaves
    the present sizes as they are.
    """

    def __init__(self, served: ServedGraphs, sizes: EngineBuckets, take: TakeSizes) -> None:
        """`take` is called once, at the swap."""
        self.sizes, self._take = sizes, take
        self._graphs, self._factory = served
        self._tables = tables_of(sizes)
        self.specs = self._graphs.specs_of(self._tables)
        own = self._graphs.inputs
        self._missing = [spec for spec in self.specs if spec not in own]
        self._inputs = {spec: self._graphs.make_inputs(spec) for spec in self._missing}
        self._results: Counter[Result] = Counter()
        self._programs: deque[MadeProgram] = deque()
        self._bound: deque[StepGraph] = deque()
        self._warm: list[StepGraph] = []
        self._began = time.monotonic()
        self._seconds: float | None = None
        self.error: str | None = None
        self.is_done = False
        self._child = GraphChild(self._missing, self._make) if self._missing else None

    def advance(self) -> None:
        """Do the next piece of work; `is_done` or `error` is set when there is none left."""
        if self.is_done or self.error is not None:
            return
        try:
            self._advance()
        except (CompileError, CorruptArtifactError, KeyError) as error:
            self.close(str(error))

    def close(self, error: str) -> None:
        """Give up: free the child and the new graphs."""
        self.error, self._seconds = error, time.monotonic() - self._began
        if self._child is not None:
            self._child.close()
        self._programs.clear()
        self._bound.clear()
        self._warm.clear()
        self._inputs.clear()

    def report(self) -> dict[str, Any]:
        """Return the phase, graphs done and in all, and seconds, for the HTTP process."""
        took = self._seconds if self._seconds is not None else time.monotonic() - self._began
        return {
            "phase": self._phase(),
            "done": len(self._warm),
            "total": len(self._missing),
            "graphs": dict(self._results),
            "seconds": took,
            "error": self.error,
        }

    def _phase(self) -> str:
        if self.error is not None:
            return "failed"
        if self.is_done:
            return "done"
        if self._child is not None and self._child.is_running:
            return "compile"
        return "warmup" if len(self._warm) < len(self._missing) else "swap"

    def _advance(self) -> None:
        if self._child is not None and self._child.is_running:
            self._programs.extend(self._child.receive())
        if self._bound:
            self._warm.append(_run(self._bound.popleft()))
        elif self._programs:
            self._bound.append(self._bind(self._programs.popleft()))
        elif len(self._warm) == len(self._missing):
            self._swap()
        elif self._child is None or not self._child.is_running:
            raise CompileError("the child process ended before it made all graphs")

    def _make(self) -> Iterator[ObtainedProgram]:
        beside = [_request(spec, inputs) for spec, inputs in self._graphs.inputs.items()]
        return self._factory.obtain_each(
            [_request(spec, inputs) for spec, inputs in self._inputs.items()], NoListener(), beside
        )

    def _bind(self, made: MadeProgram) -> StepGraph:
        inputs = self._inputs[made.spec]
        graph = self._factory.bind(_request(made.spec, inputs), Program.from_bytes(made.data))
        self._results[made.result] += 1
        return StepGraph(made.spec, inputs, graph)

    def _swap(self) -> None:
        self._graphs.adopt(self._tables, self._warm)
        self._take(self.sizes)
        self._seconds = time.monotonic() - self._began
        self.is_done = True
        names = {phase.value: list(table) for phase, table in self._tables.items()}
        logger.info("Buckets changed in %.1f s: %s", self._seconds, names)


def tables_of(sizes: EngineBuckets) -> Mapping[Phase, BucketTable]:
    """Return the sizes of a model that generates text, by phase."""
    assert sizes.decode is not None
    return {Phase.PREFILL: sizes.chunks, Phase.DECODE: sizes.decode}


@torch.inference_mode()
def _run(step: StepGraph) -> StepGraph:
    """Run a new graph over the padding that its buffers hold, as warm-up does."""
    graph: CompiledGraph = step.graph
    graph.run()
    return step


def _request(spec: GraphSpec, inputs: StepInputs) -> GraphRequest:
    return GraphRequest(spec, inputs.tensors, inputs.metadata)
