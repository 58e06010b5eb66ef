"""The first runs measure the seconds of step sizes, of as many as the time limit allows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.verify import VerifyTable
from rbln_backend.core import GraphSpec, Phase, UsefulRows
from rbln_backend.reporting.progress import ProgressWriter
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.worker.startup.warmup import WarmUp

BUCKETS = BucketTable((1, 4, 8))
VERIFY = VerifyTable(BUCKETS, (2, 4), 16)
CHUNK = GraphSpec.of(Phase.PREFILL, 64)
STEPS = [
    *(GraphSpec.of(Phase.DECODE, bucket) for bucket in BUCKETS),
    *(GraphSpec.of(Phase.VERIFY, bucket, length) for bucket, length in VERIFY),
]


@dataclass
class Graph:
    """Takes a millisecond for each token, or as many as it is slower."""

    spec: GraphSpec
    slower: float = 1.0
    runs: int = 0
    is_prepared: bool = False

    def run(self, useful: UsefulRows | None = None) -> tuple[Tensor, ...]:
        tokens = self.spec.batch_size * self.spec.query_len
        time.sleep(tokens * 1e-3 * self.slower)
        self.runs += 1
        return ()

    def prepare(self) -> None:
        self.is_prepared = True


def warmed(tmp_path: Path, graphs: list[Graph], **options: Any) -> dict[tuple[int, int], float]:
    warm_up = WarmUp(ProgressWriter(tmp_path, 0, None), MetricsBoard(None, 0))
    return warm_up.run_all(graphs, **options)


def test_every_size_is_measured_in_its_own_graph(tmp_path: Path) -> None:
    graphs = [Graph(spec) for spec in (CHUNK, *STEPS)]
    found = warmed(tmp_path, graphs, verify=VERIFY)
    assert set(found) == {(spec.bucket, spec.length) for spec in STEPS}
    assert all(seconds >= size[0] * size[1] * 1e-3 for size, seconds in found.items())
    assert found[1, 1] < found[4, 4]
    assert graphs[0].runs == 1


def test_a_large_model_is_measured_at_its_smallest_sizes(tmp_path: Path) -> None:
    graphs = [Graph(spec, slower=80.0) for spec in STEPS[:1]] + [Graph(s) for s in STEPS[1:]]
    found = set(warmed(tmp_path, graphs, verify=VERIFY))
    assert {(1, 1)} <= found <= {(1, 1), (1, 2), (1, 4), (4, 1)}


def test_without_drafts_nothing_is_measured(tmp_path: Path) -> None:
    graphs = [Graph(spec) for spec in STEPS]
    assert warmed(tmp_path, graphs) == {}
    assert sum(graph.runs for graph in graphs) == 2
