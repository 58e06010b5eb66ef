"""The graphs of one engine by what a step needs: a phase and a number of rows or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.compiler.port import CompiledGraph, GraphSpec, Phase
from rbln_backend.worker.graph_dispatch import GraphDispatch
from rbln_backend.worker.step_inputs import StepInputs
from rbln_backend.worker.warmup_plan import plan


class StepGraph(NamedTuple):
    """A compiled graph and the buffers it reads."""

    spec: GraphSpec
    inputs: StepInputs
    graph: CompiledGraph


@dataclass(frozen=True)
class GraphSet:
    """Bucket tables, one set of buffers per graph, and the dispatch."""

    prefill_chunks: BucketTable
    decode_buckets: BucketTable
    inputs: Mapping[GraphSpec, StepInputs]
    dispatch: GraphDispatch

    @classmethod
    def allocate(
        cls,
        prefill_chunks: BucketTable,
        decode_buckets: BucketTable,
        dispatch: GraphDispatch,
        *,
        num_partitions: int,
        block_size: int,
        one_block: bool,
    ) -> GraphSet:
        """Buffers for every chunk and bucket; ``one_block`` as in ``RblnAttentionMetadata``."""
        inputs = {
            spec: StepInputs.allocate(
                spec, num_partitions=num_partitions, block_size=block_size, one_block=one_block
            )
            for spec in plan(prefill_chunks, decode_buckets, has_logits=False)
        }
        return cls(prefill_chunks, decode_buckets, inputs, dispatch)

    def select(self, phase: Phase, size: int) -> StepGraph:
        """The smallest graph of ``phase`` that holds ``size`` tokens (PREFILL) or requests."""
        table = self.prefill_chunks if phase is Phase.PREFILL else self.decode_buckets
        spec = GraphSpec.of(phase, table.find(size))
        return StepGraph(spec, self.inputs[spec], self.dispatch.get(spec))
