"""After warm-up an unknown shape is refused or counted, by policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from rbln_backend.buckets import BucketTable
from rbln_backend.core import GraphSpec, Phase, UsefulRows
from rbln_backend.errors import UncompiledShapeError
from rbln_backend.worker.graph_set import LOGITS_ROWS, GraphDispatch, plan


@dataclass
class Graph:
    spec: GraphSpec

    def run(self, useful: UsefulRows | None = None) -> tuple[torch.Tensor, ...]:
        return ()


DECODE_2, DECODE_4 = (GraphSpec.of(Phase.DECODE, size) for size in (2, 4))


def dispatch(policy: Literal["error", "warn"]) -> tuple[GraphDispatch, list[GraphSpec]]:
    missed: list[GraphSpec] = []
    made = GraphDispatch(Graph, policy=policy, on_miss=missed.append)
    made.add(Graph(DECODE_2))
    return made, missed


def test_before_warm_up_ends_a_miss_compiles_silently() -> None:
    graphs, missed = dispatch("error")
    assert graphs.get(DECODE_4).spec == DECODE_4
    assert missed == []


def test_error_policy_raises_and_counts() -> None:
    graphs, missed = dispatch("error")
    graphs.seal()
    with pytest.raises(UncompiledShapeError, match=r"decode-4.*compiled: decode-2"):
        graphs.get(DECODE_4)
    assert missed == [DECODE_4]
    assert graphs.get(DECODE_2).spec == DECODE_2


def test_warn_policy_compiles_once_and_counts_once() -> None:
    graphs, missed = dispatch("warn")
    graphs.seal()
    assert graphs.get(DECODE_4) is graphs.get(DECODE_4)
    assert missed == [DECODE_4]


def test_plan_covers_every_bucket_smallest_first() -> None:
    tables = {Phase.PREFILL: BucketTable((16, 64)), Phase.DECODE: BucketTable((1, 2, 4))}
    specs = plan(tables, has_logits=True)
    assert [str(spec) for spec in specs] == [
        "prefill-16",
        "prefill-64",
        "decode-1",
        "decode-2",
        "decode-4",
        f"logits-{LOGITS_ROWS}",
    ]
    assert len(plan({Phase.POOLING: BucketTable((16, 64))}, has_logits=False)) == 2
