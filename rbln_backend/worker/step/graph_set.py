"""The graphs of one engine, selected by phase and number of rows or tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rbln_backend.bucketing.engine_buckets import EngineBuckets
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.verify import NO_DRAFTS, VerifyTable
from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.worker.graphs.dispatch import GraphDispatch
from rbln_backend.worker.graphs.warmup_plan import plan, spec_of
from rbln_backend.worker.step.inputs import StepInputs


class StepGraph(NamedTuple):
    """A compiled graph and its input buffers."""

    spec: GraphSpec
    inputs: StepInputs
    graph: CompiledGraph


@dataclass(frozen=True)
class GraphSet:
    """Bucket tables, one set of buffers per graph, and the dispatch."""

    tables: Mapping[Phase, BucketTable]
    verify: VerifyTable
    inputs: Mapping[GraphSpec, StepInputs]
    dispatch: GraphDispatch
    prompts: int = 1
    _selected: dict[tuple[Phase, int, int], StepGraph] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        tables: Mapping[Phase, BucketTable],
        dispatch: GraphDispatch,
        make_inputs: Callable[[GraphSpec], StepInputs],
        *,
        verify: VerifyTable = NO_DRAFTS,
        prompts: int = 1,
    ) -> GraphSet:
        """Allocate buffers of every chunk, bucket and length; large chunks hold ``prompts``."""
        specs = plan(tables, verify, has_logits=False, prompts=prompts)
        inputs = {spec: make_inputs(spec) for spec in specs}
        return cls(tables, verify, inputs, dispatch, prompts)

    def select(self, phase: Phase, size: int, length: int = 1) -> StepGraph:
        """Return the smallest graph of ``phase`` for ``size`` tokens of a chunk or requests.

        ``length``: the tokens of each request, in VERIFY.
        """
        selected = self._selected.get((phase, size, length))
        if selected is None:
            spec = self._spec(phase, size, length)
            selected = StepGraph(spec, self.inputs[spec], self.dispatch.get(spec))
            self._selected[(phase, size, length)] = selected
        return selected

    def _spec(self, phase: Phase, size: int, length: int) -> GraphSpec:
        if phase is Phase.VERIFY:
            return GraphSpec.of(phase, *self.verify.find(size, length))
        return spec_of(phase, self.tables[phase].find(size), self.prompts)

    def exchange(self, graph: CompiledGraph) -> None:
        """Replace the graph of the same spec by ``graph``."""
        self.dispatch.add(graph)
        self._selected.clear()


def tables_of(sizes: EngineBuckets) -> dict[Phase, BucketTable]:
    """Return sizes by phase."""
    if sizes.decode is None:
        return {Phase.POOLING: sizes.chunks}
    return {Phase.PREFILL: sizes.chunks, Phase.DECODE: sizes.decode}
