"""The graphs of an engine: their plan, their buffers, and the choice of one for a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.buckets import (
    NO_DRAFTS,
    BucketTable,
    DraftSizes,
    EngineBuckets,
    VerifyTable,
    get_prompts,
)
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.devices.port import CompiledGraph
from rbln_backend.errors import UncompiledShapeError
from rbln_backend.lora.slots import INPUT_NAME
from rbln_backend.worker.inputs import StepInputs

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters


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
            if phase is Phase.VERIFY:
                spec = GraphSpec.of(phase, *self.verify.find(size, length))
            else:
                spec = get_spec(phase, self.tables[phase].find(size), self.prompts)
            selected = StepGraph(spec, self.inputs[spec], self.dispatch.get(spec))
            self._selected[(phase, size, length)] = selected
        return selected

    def exchange(self, graph: CompiledGraph) -> None:
        self.dispatch.add(graph)
        self._selected.clear()


def get_tables(sizes: EngineBuckets) -> dict[Phase, BucketTable]:
    if sizes.decode is None:
        return {Phase.POOLING: sizes.chunks}
    return {Phase.PREFILL: sizes.chunks, Phase.DECODE: sizes.decode}


# Rows of one run of the LM head alone, for prompt logprobs. Prompts are split into parts of this
# size, so that a large vocabulary does not need [chunk, vocab] logits at once.
LOGITS_ROWS = 32

ADAPTER_PRODUCT = GraphSpec.of(Phase.ADAPTERS, 8)
"""The graph with which a start on an NPU tests adapter slots."""


def plan(
    tables: Mapping[Phase, BucketTable],
    verify: VerifyTable = NO_DRAFTS,
    *,
    has_logits: bool,
    tests_slots: bool = False,
    prompts: int = 1,
    drafted: DraftSizes | None = None,
) -> list[GraphSpec]:
    """Return every graph, smallest first within a phase.

    ``verify``: sizes of steps that check drafts. ``has_logits``: False for pooling models.
    ``tests_slots``: True with adapters on an NPU.
    ``prompts``: most prompts of the largest prefill chunk. ``drafted``: sizes of the draft
    model's graphs, None without one.
    """
    specs = [get_spec(phase, size, prompts) for phase, table in tables.items() for size in table]
    specs += [GraphSpec.of(Phase.VERIFY, bucket, length) for bucket, length in verify]
    if has_logits:
        specs.append(GraphSpec.of(Phase.LOGITS, LOGITS_ROWS))
    if tests_slots:
        specs.append(ADAPTER_PRODUCT)
    return specs + draft_specs(drafted, prompts)


def draft_specs(drafted: DraftSizes | None, prompts: int = 1) -> list[GraphSpec]:
    """Return the graphs of a draft model, smallest first; none without one."""
    if drafted is None:
        return []
    specs = [GraphSpec.of(Phase.DRAFT, size) for size in drafted.requests]
    if drafted.length is None:
        return specs
    specs += [GraphSpec.of(Phase.DRAFT, size, drafted.length) for size in drafted.requests]
    return specs + [get_spec(Phase.DRAFT_PREFILL, size, prompts) for size in drafted.chunks]


def get_spec(phase: Phase, size: int, prompts: int) -> GraphSpec:
    """Return the graph of a chunk or a decode bucket; ``prompts`` as for ``plan``."""
    return GraphSpec.of(phase, size, prompts=get_prompts(size, prompts) if phase.takes_chunk else 1)


class GraphDispatch:
    """Table of the compiled graphs. Once sealed, an unknown shape is a hot-path compile.

    Policy ``error`` rejects it, ``warn`` compiles it; both call ``on_miss``.
    """

    def __init__(
        self,
        compile_graph: Callable[[GraphSpec], CompiledGraph],
        *,
        policy: Literal["error", "warn"],
        on_miss: Callable[[GraphSpec], None],
    ) -> None:
        self._compile = compile_graph
        self._policy = policy
        self._on_miss = on_miss
        self._graphs: dict[GraphSpec, CompiledGraph] = {}
        self._sealed = False

    @property
    def specs(self) -> list[GraphSpec]:
        return sorted(self._graphs)

    def add(self, graph: CompiledGraph) -> None:
        self._graphs[graph.spec] = graph

    def seal(self) -> None:
        """End the warm-up: from now on every shape must be known."""
        self._sealed = True

    def get(self, spec: GraphSpec) -> CompiledGraph:
        """Return the graph of ``spec``.

        Raises ``UncompiledShapeError`` for an unknown one, if sealed with policy ``error``.
        """
        graph = self._graphs.get(spec)
        if graph is not None:
            return graph
        if self._sealed:
            self._on_miss(spec)
            if self._policy == "error":
                raise UncompiledShapeError(
                    f"graph {spec} was not compiled at warm-up; compiled: "
                    f"{', '.join(map(str, self.specs)) or 'none'}"
                )
        graph = self._compile(spec)
        self._graphs[spec] = graph
        return graph


LM_HEAD = GraphSpec.of(Phase.LOGITS, LOGITS_ROWS)


class LmHead:
    """The graph of the LM head as a function: hidden [n, H] of a request to logits [n, V]."""

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        dispatch: GraphDispatch,
        adapters: Adapters | None = None,
    ) -> None:
        """``adapters`` is None in an engine without adapters."""
        self.inputs = {"hidden": torch.zeros(LOGITS_ROWS, hidden_size, dtype=dtype)}
        if adapters is not None:
            self.inputs[INPUT_NAME] = adapters.row_input.allocate(1)
        self._dispatch, self._adapters = dispatch, adapters

    def __call__(self, hidden: Tensor, request: CachedRequestState) -> Tensor:
        buffer, pieces = self.inputs["hidden"], []
        if self._adapters is not None:
            slot = self._adapters.get_slot(request)
            self._adapters.row_input.fill(self.inputs[INPUT_NAME], [slot])
        for piece in hidden.split(LOGITS_ROWS):
            rows = len(piece)
            buffer[:rows] = piece
            buffer[rows:] = 0
            logits = self._dispatch.get(LM_HEAD).run()[0].cpu()
            # The next run may overwrite the output.
            pieces.append(logits[:rows].clone())
        return torch.cat(pieces)
