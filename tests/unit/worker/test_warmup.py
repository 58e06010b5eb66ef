"""Graphs that run before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rbln_backend.buckets import BucketTable, VerifyTable
from rbln_backend.core import GraphSpec, Phase, UsefulRows
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.reports.progress import ProgressWriter
from rbln_backend.worker.warmup import WarmUp

BUCKETS = BucketTable((1, 4, 8))
VERIFY = VerifyTable(BUCKETS, (2, 4), 16)
CHUNK = GraphSpec.of(Phase.PREFILL, 64)
STEPS = [
    *(GraphSpec.of(Phase.DECODE, bucket) for bucket in BUCKETS),
    *(GraphSpec.of(Phase.VERIFY, bucket, length) for bucket, length in VERIFY),
]


@dataclass
class Graph:
    """Counts its runs."""

    spec: GraphSpec
    runs: int = 0
    is_prepared: bool = False

    def run(self, useful: UsefulRows | None = None) -> tuple[Tensor, ...]:
        self.runs += 1
        return ()

    def prepare(self) -> None:
        self.is_prepared = True


def test_the_smallest_graph_of_each_phase_runs_and_the_others_are_prepared(tmp_path: Path) -> None:
    """All are loaded: none is new."""
    graphs = [Graph(spec) for spec in (CHUNK, *STEPS)]
    WarmUp(ProgressWriter(tmp_path, 0, None), MetricsBoard(None, 0)).run_all(graphs)
    first = {CHUNK, STEPS[0], STEPS[len(BUCKETS)]}
    assert {graph.spec for graph in graphs if graph.runs == 1} == first
    assert {graph.spec for graph in graphs if graph.is_prepared} == {CHUNK, *STEPS} - first
