"""Which graph a step runs in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from rbln_backend.buckets import BucketTable
from rbln_backend.core import GraphSpec, Phase, UsefulRows
from rbln_backend.worker.graph_set import GraphDispatch, GraphSet
from rbln_backend.worker.inputs import StepInputs

TABLES = {Phase.PREFILL: BucketTable((16, 64)), Phase.DECODE: BucketTable((1, 2, 4, 8))}


@dataclass
class Graph:
    spec: GraphSpec

    def run(self, useful: UsefulRows | None = None) -> tuple[torch.Tensor, ...]:
        return ()


def test_select_returns_the_smallest_graph() -> None:
    dispatch = GraphDispatch(Graph, policy="error", on_miss=lambda _: None)
    graphs = GraphSet.allocate(TABLES, dispatch, partial(StepInputs.allocate, groups=[]), prompts=3)
    for spec in graphs.inputs:
        dispatch.add(Graph(spec))
    dispatch.seal()
    wanted = ((Phase.PREFILL, 9, 16), (Phase.PREFILL, 17, 64), (Phase.DECODE, 1, 1))
    for phase, size, bucket in (*wanted, (Phase.DECODE, 5, 8)):
        step = graphs.select(phase, size)
        prompts = 3 if (phase, bucket) == (Phase.PREFILL, 64) else 1
        assert step.spec == GraphSpec.of(phase, bucket, prompts=prompts)
        assert step.graph.spec == step.spec
        assert step.inputs is graphs.inputs[step.spec]
