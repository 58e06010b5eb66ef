"""Where the graphs of a warm-up come from: the store, children that capture, or this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.devices.emulated.compiler import EmulatedCompiler
from rbln_backend.devices.emulated.packing import pack
from rbln_backend.graphs.artifacts import PROGRAM, ArtifactStore, StoreEvent
from rbln_backend.graphs.program import write_document
from rbln_backend.graphs.tensors import TensorTable
from rbln_backend.worker.graph_factory import GraphFactory, GraphListener, GraphRequest, Result

THIS = os.getpid()
SPECS = [GraphSpec.of(Phase.LOGITS, rows) for rows in (1, 2, 4)]


class Model(nn.Module):
    """An LM head without the rest of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


class Recorded(GraphListener):
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.started: list[GraphSpec] = []
        self.done: dict[GraphSpec, Result] = {}

    def graph_started(self, spec: GraphSpec) -> None:
        self.started.append(spec)

    def graph_done(self, spec: GraphSpec, result: Result, seconds: float) -> None:
        assert spec in self.started
        assert seconds > 0.0
        self.done[spec] = result


@contextmanager
def anywhere(_: GraphRequest) -> Iterator[None]:
    yield


@contextmanager
def deadly_in_children(_: GraphRequest) -> Iterator[None]:
    if os.getpid() != THIS:
        os.kill(os.getpid(), signal.SIGKILL)
    yield


@contextmanager
def deadly_here(_: GraphRequest) -> Iterator[None]:
    assert os.getpid() != THIS
    yield


def factory(store: ArtifactStore | None, context: object, workers: int) -> GraphFactory:
    model = Model()
    table = TensorTable(pack)
    table.add_model(model)
    return GraphFactory(
        model=model,
        compiler=EmulatedCompiler("aten"),
        table=table,
        store=store,
        key_fields={},
        forward_context=context,  # type: ignore[arg-type]  # three functions of one signature
        capture_workers=workers,
    )


def requests(specs: Sequence[GraphSpec] = SPECS) -> list[GraphRequest]:
    return [GraphRequest(spec, {"hidden": torch.randn(spec.bucket, 4)}, None) for spec in specs]


@pytest.mark.parametrize(
    ("context", "workers"), [(anywhere, 1), (deadly_here, 2), (deadly_in_children, 2)]
)
@pytest.mark.parametrize("cached", [True, False])
def test_missing_graphs_are_captured_in_children_or_in_process(
    context: object, workers: int, cached: bool, tmp_path: Path
) -> None:
    events: list[StoreEvent] = []
    store = ArtifactStore(tmp_path, max_bytes=1 << 20, on_event=events.append) if cached else None
    graphs, heard = factory(store, context, workers), Recorded()
    programs = graphs.obtain_all(requests(), heard)
    assert heard.done == dict.fromkeys(SPECS, "compiled")
    assert [e.kind for e in events if e.kind != "lock_wait"] == (
        ["miss"] * 3 + ["stored"] * 3 if cached else []
    )
    request = requests()[1]
    with torch.inference_mode():
        (logits,) = graphs.bind(request, programs[request.spec]).run()
    assert logits.shape == (2, 8)


def test_stored_graphs_are_loaded_without_a_capture(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, max_bytes=1 << 20, on_event=lambda _: None)
    factory(store, anywhere, 1).obtain_all(requests()[:2], Recorded())
    heard = Recorded()
    programs = factory(store, anywhere, 2).obtain_all(requests(), heard)
    assert heard.done == {SPECS[0]: "loaded", SPECS[1]: "loaded", SPECS[2]: "compiled"}
    assert list(heard.started) == SPECS
    assert set(programs) == set(SPECS)


HEAD = ["param:head.weight", "param:head.bias", "input:hidden"]


def stored_document(bindings: list[str], arguments: list[object]) -> bytes:
    nodes = [
        *([{"op": "placeholder"}] * len(bindings)),
        {"op": "nn.linear", "args": {"tuple": arguments}},
        {"op": "output", "args": {"tuple": [[{"node": len(bindings)}]]}},
    ]
    return write_document(bindings, nodes)


@pytest.mark.parametrize(
    ("bindings", "arguments", "reason"),
    [
        (HEAD, [{"node": 1}, {"node": 0}, None], "does not fit its arguments"),
        (["param:other", *HEAD[1:]], [{"node": 2}, {"node": 0}, None], "'param:other', which this"),
        ([*HEAD[:2], "input:x"], [{"node": 2}, {"node": 0}, None], "'input:x', which this model"),
        (["packed:head.bias", *HEAD[1:]], [{"node": 2}, {"node": 0}, None], "has no packed form"),
    ],
)
def test_a_stored_graph_that_does_not_fit_the_model_is_compiled_again(
    bindings: list[str], arguments: list[object], reason: str, tmp_path: Path
) -> None:
    """Each is valid as a program, and its run would end the start."""
    events: list[StoreEvent] = []
    store = ArtifactStore(tmp_path, max_bytes=1 << 20, on_event=events.append)
    graphs, heard = factory(store, anywhere, 1), Recorded()
    for spec in SPECS:
        store.store(graphs.key(spec), {PROGRAM: stored_document(bindings, arguments)})
    graphs.obtain_all(requests(), heard)
    assert heard.done == dict.fromkeys(SPECS, "compiled")
    damaged = [event.detail for event in events if event.kind == "corrupt"]
    assert len(damaged) == 3
    assert all(reason in detail for detail in damaged)
    again = Recorded()
    factory(store, anywhere, 1).obtain_all(requests(), again)
    assert again.done == dict.fromkeys(SPECS, "loaded")
