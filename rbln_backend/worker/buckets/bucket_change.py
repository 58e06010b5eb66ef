"""`BucketChange`: replaces the compiled sizes of a running engine, in slices between steps."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from rbln_backend.bucketing.engine_buckets import EngineBuckets
from rbln_backend.compiler.programs.program import Program
from rbln_backend.core import GraphSpec
from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.vllm_compat.surface import VllmConfig, init_logger
from rbln_backend.worker.buckets.compile_job import CompileJob
from rbln_backend.worker.buckets.compile_process import CompileProcess
from rbln_backend.worker.buckets.graph_child import GraphChild, MadeProgram, ProgramSource
from rbln_backend.worker.graphs.factory import (
    GraphFactory,
    GraphRequest,
    NoListener,
    ObtainedProgram,
    Result,
)
from rbln_backend.worker.step.graph_set import GraphSet, StepGraph, tables_of
from rbln_backend.worker.step.inputs import StepInputs

logger = init_logger(__name__)

COMPILE, WARMUP, SWAP, DONE = "compile", "warmup", "swap", "done"
"""Phases of a change, in order; or it is `failed`."""


class ServedGraphs(NamedTuple):
    """The graphs of a running engine, and what makes others."""

    config: VllmConfig
    graphs: GraphSet
    factory: GraphFactory
    others: Sequence[GraphSpec]
    """Graphs that no sizes change."""


class TakeSizes(Protocol):
    """Passes other sizes to every part of the engine that chooses among them."""

    def __call__(self, sizes: EngineBuckets) -> None:
        """Take `sizes` from the next step on."""
        ...


class BucketChange:
    """One change, from the missing programs to the swap.

    Each call of `advance` does one piece of work between two steps: it parses and binds one
    program, or runs one graph over padding, or swaps. Programs come from a process beside the
    engine, which is started only where graphs are missing. Until the swap no step sees any of
    this, and a failure leaves the present sizes as they are.

    Several ranks go through the phases together: a graph may exchange tensors between ranks, so
    that all run it in the same call, once each of them has bound all graphs.
    """

    def __init__(
        self,
        served: ServedGraphs,
        sizes: EngineBuckets,
        take: TakeSizes,
        charge: Callable[[float], None],
    ) -> None:
        """`take` is called once, at the swap; `charge` with the seconds of each warm-up run."""
        self.sizes, self._take, self._charge = sizes, take, charge
        self._served = served
        self._graphs, self._factory = served.graphs, served.factory
        self._tables = tables_of(sizes)
        self.specs = self._graphs.specs_of(self._tables, sizes.verify)
        own = self._graphs.inputs
        self._missing = [spec for spec in self.specs if spec not in own]
        self._inputs = {spec: self._graphs.make_inputs(spec) for spec in self._missing}
        self._results: Counter[Result] = Counter()
        self._programs: deque[MadeProgram] = deque()
        self._bound: dict[GraphSpec, StepGraph] = {}
        self._warm: list[StepGraph] = []
        self._began = time.monotonic()
        self._seconds: float | None = None
        self.error: str | None = None
        self.is_done = False
        self._source = self._open_source() if self._missing else None

    def advance(self, phase: str) -> None:
        """Do the next piece of work of `phase`, unless this rank is in another one.

        `is_done` or `error` is set when there is none left.
        """
        if phase != self._phase():
            return
        try:
            self._advance(phase)
        except (CompileError, CorruptArtifactError, KeyError) as error:
            self.close(str(error))

    def close(self, error: str) -> None:
        """Give up: free the process beside the engine and the new graphs."""
        self.error, self._seconds = error, time.monotonic() - self._began
        if self._source is not None:
            self._source.close()
        self._programs.clear()
        self._bound.clear()
        self._warm.clear()
        self._inputs.clear()

    def report(self) -> dict[str, Any]:
        """Return the phase, its graphs done and in all, and seconds, for the HTTP process.

        For an NPU's compiler the graphs of phase ``compile`` are those of the whole set.
        """
        counts = self._source.counts if self._source is not None else None
        ready = self._bound if self._phase() == COMPILE else self._warm
        done, total = counts or (len(ready), len(self._missing))
        took = self._seconds if self._seconds is not None else time.monotonic() - self._began
        return {
            "phase": self._phase(),
            "done": done,
            "total": total,
            "graphs": dict(self._results),
            "decode": list(self.sizes.decode or ()),
            "prefill": list(self.sizes.chunks),
            "seconds": took,
            "error": self.error,
        }

    def _phase(self) -> str:
        if self.error is not None:
            return "failed"
        if self.is_done:
            return DONE
        if len(self._bound) < len(self._missing):
            return COMPILE
        return WARMUP if len(self._warm) < len(self._missing) else SWAP

    def _advance(self, phase: str) -> None:
        if phase == COMPILE:
            self._prepare()
        elif phase == WARMUP:
            self._warm.append(self._run(self._bound[self._missing[len(self._warm)]]))
        elif phase == SWAP:
            self._swap()

    def _prepare(self) -> None:
        """Take what has been made, and bind one program."""
        assert self._source is not None
        if self._source.is_running:
            self._programs.extend(self._source.receive())
        if self._programs:
            step = self._bind(self._programs.popleft())
            self._bound[step.spec] = step
            if len(self._bound) == len(self._missing):
                self._source.close()
        elif not self._source.is_running:
            raise CompileError("the process beside the engine ended before it made all graphs")

    def _open_source(self) -> ProgramSource:
        """Start what makes the missing programs: a fork that has the model, or a new process."""
        if not self._factory.compiles_when_loading:
            return GraphChild(self._missing, self._make)
        others = self._served.others
        job = CompileJob(self._served.config, self.sizes, [*self._graphs.specs, *others])
        requests = [_request(spec, inputs) for spec, inputs in self._inputs.items()]
        return CompileProcess(job, self._factory, requests, [*self.specs, *others])

    def _make(self) -> Iterator[ObtainedProgram]:
        requests = [_request(spec, inputs) for spec, inputs in self._inputs.items()]
        return self._factory.obtain_each(requests, NoListener())

    def _bind(self, made: MadeProgram) -> StepGraph:
        inputs = self._inputs[made.spec]
        graph = self._factory.bind(_request(made.spec, inputs), Program.from_bytes(made.data))
        self._results[made.result] += 1
        return StepGraph(made.spec, inputs, graph)

    @torch.inference_mode()
    def _run(self, step: StepGraph) -> StepGraph:
        """Run a new graph over the padding that its buffers hold, as warm-up does."""
        began = time.perf_counter()
        step.graph.run()
        self._charge(time.perf_counter() - began)
        return step

    def _swap(self) -> None:
        self._graphs.adopt(self._tables, self.sizes.verify, self._warm)
        self._take(self.sizes)
        self._seconds = time.monotonic() - self._began
        self.is_done = True
        names = {phase.value: list(table) for phase, table in self._tables.items()}
        logger.info("Buckets changed in %.1f s: %s", self._seconds, names)


def _request(spec: GraphSpec, inputs: StepInputs) -> GraphRequest:
    return GraphRequest(spec, inputs.tensors, inputs.metadata)
