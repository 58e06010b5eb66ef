"""Where the graphs of a warm-up come from: the store, children that capture, or this process."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

from rbln_backend.buckets import BucketTable, VerifyTable
from rbln_backend.core import GraphSpec, Phase, UsefulRows
from rbln_backend.devices.emulated.compiler import EmulatedCompiler
from rbln_backend.devices.emulated.packing import pack
from rbln_backend.errors import UncompiledShapeError
from rbln_backend.graphs.cache import PROGRAM, ArtifactStore, StoreEvent
from rbln_backend.graphs.program import write_document
from rbln_backend.graphs.tensors import TensorTable
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.reports.progress import ProgressWriter
from rbln_backend.worker.executor import DirectExecutor
from rbln_backend.worker.graph_factory import (
    GraphFactory,
    GraphListener,
    GraphRequest,
    Result,
    capture_in_children,
)
from rbln_backend.worker.graph_set import LOGITS_ROWS, GraphDispatch, GraphSet, plan
from rbln_backend.worker.inputs import StepInputs
from rbln_backend.worker.runner import StepInFlight
from rbln_backend.worker.warmup import WarmUp

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
    parts = {"model": model, "compiler": EmulatedCompiler("aten"), "table": table, "store": store}
    context = {"forward_context": context, "capture_workers": workers}
    return GraphFactory(**parts, **context, key_fields={})  # type: ignore[arg-type]


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


# ------------------------------------------------------------------------------------- capture pool
CAPTURED = [GraphSpec("decode", size) for size in (1, 2, 4, 8, 16)]


def by_its_name(spec: GraphSpec) -> bytes:
    return f"{spec} by {os.getpid()}".encode()


def name_in(data: bytes) -> str:
    return data.decode().partition(" by ")[0]


def children() -> set[str]:
    """Processes of ours: other tests of this process may have some, too."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    return set(text.split())


def test_every_graph_is_delivered_once_by_other_processes() -> None:
    before = children()
    started: list[GraphSpec] = []
    captured = list(capture_in_children(CAPTURED, by_its_name, workers=3, on_start=started.append))
    assert sorted(c.spec for c in captured) == sorted(started) == CAPTURED
    assert all(name_in(c.data) == str(c.spec) and c.seconds > 0.0 for c in captured)
    assert str(os.getpid()) not in {c.data.decode().partition(" by ")[2] for c in captured}
    assert children() == before


@pytest.mark.parametrize("fate", ["killed", "failed"])
def test_graphs_of_a_lost_child_are_missing_and_the_others_arrive(fate: str) -> None:
    before = children()

    def capture(spec: GraphSpec) -> bytes:
        if spec == CAPTURED[1]:
            if fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("cannot be captured")
        # The other child gets all the time it needs to take the doomed graph.
        time.sleep(0.05)
        return by_its_name(spec)

    captured = list(capture_in_children(CAPTURED, capture, workers=2, on_start=lambda _: None))
    assert sorted(c.spec for c in captured) == [spec for spec in CAPTURED if spec != CAPTURED[1]]
    assert children() == before


def test_a_child_without_progress_is_killed_after_the_timeout() -> None:
    before = children()

    def capture(spec: GraphSpec) -> bytes:
        if spec == CAPTURED[-1]:
            signal.pause()
        return by_its_name(spec)

    captured = list(
        capture_in_children(CAPTURED, capture, workers=2, on_start=lambda _: None, timeout_s=0.5)
    )
    assert sorted(c.spec for c in captured) == CAPTURED[:-1]
    assert children() == before


def test_a_long_capture_ends_beside_a_child_without_progress() -> None:
    def capture(spec: GraphSpec) -> bytes:
        if spec == CAPTURED[0]:
            signal.pause()
        end = time.process_time() + 1.2
        while spec == CAPTURED[1] and time.process_time() < end:
            pass
        return by_its_name(spec)

    captured = list(
        capture_in_children(CAPTURED, capture, workers=2, on_start=lambda _: None, timeout_s=0.5)
    )
    assert sorted(c.spec for c in captured) == CAPTURED[1:]


def test_children_are_killed_when_the_consumer_stops_early() -> None:
    before = children()

    def capture(spec: GraphSpec) -> bytes:
        if spec == CAPTURED[0]:
            return by_its_name(spec)
        signal.pause()
        return b""

    captured = capture_in_children(CAPTURED, capture, workers=2, on_start=lambda _: None)
    assert next(captured).spec == CAPTURED[0]
    captured.close()
    assert children() == before


# ----------------------------------------------------------------------------------- graph dispatch
@dataclass
class Graph:
    spec: GraphSpec

    def run(self, useful: UsefulRows | None = None) -> tuple[torch.Tensor, ...]:
        return ()


DECODE_2, DECODE_4, DECODE_8 = (GraphSpec.of(Phase.DECODE, size) for size in (2, 4, 8))


def dispatch(policy: Literal["error", "warn"]) -> tuple[GraphDispatch, list[GraphSpec]]:
    missed: list[GraphSpec] = []
    made = GraphDispatch(Graph, policy=policy, on_miss=missed.append)
    made.add(Graph(DECODE_2))
    return made, missed


def test_error_policy_raises_and_counts_after_warm_up() -> None:
    graphs, missed = dispatch("error")
    assert graphs.get(DECODE_8).spec == DECODE_8
    assert missed == []
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
    steps = "prefill-16 prefill-64 decode-1 decode-2 decode-4"
    assert [str(spec) for spec in specs] == [*steps.split(), f"logits-{LOGITS_ROWS}"]
    assert len(plan({Phase.POOLING: BucketTable((16, 64))}, has_logits=False)) == 2


# ---------------------------------------------------------------------------------------- graph set
TABLES = {Phase.PREFILL: BucketTable((16, 64)), Phase.DECODE: BucketTable((1, 2, 4, 8))}


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


# ------------------------------------------------------------------------------------------- warmup
BUCKETS = BucketTable((1, 4, 8))
VERIFY = VerifyTable(BUCKETS, (2, 4), 16)
CHUNK = GraphSpec.of(Phase.PREFILL, 64)
STEPS = [
    *(GraphSpec.of(Phase.DECODE, bucket) for bucket in BUCKETS),
    *(GraphSpec.of(Phase.VERIFY, bucket, length) for bucket, length in VERIFY),
]


@dataclass
class WarmGraph:
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
    graphs = [WarmGraph(spec) for spec in (CHUNK, *STEPS)]
    WarmUp(ProgressWriter(tmp_path, 0, None), MetricsBoard(None, 0)).run_all(graphs)
    first = {CHUNK, STEPS[0], STEPS[len(BUCKETS)]}
    assert {graph.spec for graph in graphs if graph.runs == 1} == first
    assert {graph.spec for graph in graphs if graph.is_prepared} == {CHUNK, *STEPS} - first


# ----------------------------------------------------------------------------------------- executor
EMPTY = ModelRunnerOutput(req_ids=[], req_id_to_index={})


class Worker:
    """Returns or raises what a test wants of a step."""

    def __init__(self, made: ModelRunnerOutput | AsyncModelRunnerOutput | Exception) -> None:
        self.made = made

    def sample_tokens(self, grammar: object) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


@pytest.mark.parametrize("made", [EMPTY, StepInFlight(lambda: EMPTY), ValueError("no row")])
def test_a_result_or_an_error_of_sampling_is_a_whole_future(made: Any) -> None:
    executor = DirectExecutor.__new__(DirectExecutor)
    executor.driver_worker = WorkerWrapperBase(rpc_rank=0)
    executor.driver_worker.worker = Worker(made)
    future = executor.sample_tokens(None, non_block=True)
    assert isinstance(future, Future)
    if isinstance(made, ValueError):
        for read in (future.result, lambda: executor.sample_tokens(None)):
            with pytest.raises(ValueError, match="no row"):
                read()
        return
    called: list[object] = []
    future.add_done_callback(called.append)
    assert future.result() is EMPTY
    assert called == [future]
    assert future.done() and not future.cancel() and future.exception() is None


def test_a_step_that_fails_is_ended_once_and_fails_for_every_reader() -> None:
    ends: list[None] = []

    def end() -> ModelRunnerOutput:
        ends.append(None)
        if len(ends) == 1:
            raise ValueError("lost the device")
        return EMPTY

    step = StepInFlight(end)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost the device"):
            step.get_output()
    assert len(ends) == 1
