"""What is said of graphs that are missing: the nearest entry, and the fields that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.graphs.artifacts import ArtifactStore, Entry
from rbln_backend.graphs.cache_key import CacheKey
from rbln_backend.reports.info import CompileReport, KernelReport, PlannedGraph, StoreReport
from rbln_backend.worker.check import differences

FIELDS: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "torch.bfloat16",
    "max_model_len": 2048,
    "device": {"device": "emulated", "kernels": "native"},
    "backend_sources": "a" * 64,
}


def key(phase: str = "decode", bucket: int = 1, **fields: Any) -> CacheKey:
    return CacheKey({**FIELDS, "phase": phase, "bucket": bucket, **fields})


@pytest.fixture
def entries(tmp_path: Path) -> list[Entry]:
    store = ArtifactStore(tmp_path, max_bytes=1 << 20, on_event=lambda _: None)
    for one in (key(), key(bucket=2), key("prefill", 16), key(dtype="torch.float32")):
        store.store(one, {"program.json": b"x"})
    return store.entries()


DECODE = [GraphSpec.of(Phase.DECODE, size) for size in (1, 2)]


def test_graphs_that_differ_alike_are_told_together(entries: list[Entry]) -> None:
    missing = {str(s): key(bucket=s.bucket, max_model_len=4096) for s in DECODE}
    (found,) = differences(missing, entries)
    assert found.graphs == ("decode-1", "decode-2")
    assert found.lines == ("max_model_len: 2048 -> 4096",)


def test_the_nearest_entry_is_of_the_same_phase_and_architecture(entries: list[Entry]) -> None:
    npu = {"device": "rebel", "npu": "RBLN-CA25"}
    (found,) = differences({str(DECODE[0]): key(device=npu)}, entries)
    assert found.lines[0] == 'device.device: "emulated" -> "rebel"'
    assert all(line.startswith("device.") for line in found.lines)
    assert differences({str(DECODE[0]): key(architecture="Other")}, entries) == ()


def test_another_version_is_said_in_words(entries: list[Entry]) -> None:
    (found,) = differences({str(DECODE[0]): key(backend_sources="b" * 64)}, entries)
    assert found.lines == ("backend_sources: another version of rbln-serve made it",)


def report(*states: Any, kernels: Any = "stored") -> StoreReport:
    graphs = [PlannedGraph(f"decode-{i}", "d", state) for i, state in enumerate(states)]
    return StoreReport("/cache", tuple(graphs), (), KernelReport(kernels, "as they are"))


@pytest.mark.parametrize(
    ("found", "verdict", "is_warm"),
    [
        (report("stored", "stored"), "warm: 2 of 2 graphs", True),
        (report("stored", kernels="not needed"), "warm: 1 of 1 graphs", True),
        (report("stored", "damaged"), "partly cold: 1 of 2 graphs", False),
        (report("missing", "missing"), "cold: 0 of 2 graphs", False),
        (report("stored", kernels="missing"), "partly cold: 1 of 1 graphs", False),
        (report("stored", kernels="impossible"), "partly cold: 1 of 1 graphs", False),
    ],
)
def test_warm_means_that_nothing_is_made(found: StoreReport, verdict: str, is_warm: bool) -> None:
    assert found.lines()[0].startswith(verdict)
    assert found.is_warm is is_warm
    assert found.to_dict()["warm"] is is_warm


def test_graphs_of_several_ranks_are_told_apart() -> None:
    ranks = [({"decode-1": "compiled"}, []), ({"decode-1": "loaded"}, ["decode-1"])]
    found = CompileReport.of_ranks("/cache", ranks, ["avx2"])
    assert found.compiled == ("rank 0 decode-1",)
    assert found.loaded == ("rank 1 decode-1",)
    assert found.missing == ("rank 1 decode-1",)
