"""What workers put on their boards comes out of prometheus_client's own collector."""

import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.graphs.cache import ArtifactStore, CacheKey, Entry
from rbln_backend.reports.info import CompileReport, KernelReport, PlannedGraph, StoreReport
from rbln_backend.reports.metrics import METRICS, DraftCounts, MetricsBoard, computed_rows
from rbln_backend.worker.check import differences


def collect(run_dir: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(run_dir / "metrics"))  # type: ignore[no-untyped-call]
    return registry


def test_declarations_follow_the_naming_rules() -> None:
    for metric in METRICS:
        assert metric.name.startswith("rbln_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name


def test_values_of_a_board_are_collected(tmp_path: Path) -> None:
    board = MetricsBoard(tmp_path, 0)
    board.counter("rbln_bucket_steps_total", phase="decode", bucket=8).inc()
    board.counter("rbln_bucket_steps_total", bucket="8", phase="decode").inc(2)
    board.gauge("rbln_graphs", kind="decode", result="loaded").set(5)
    board.counter("rbln_recompiles_after_warmup_total", kind="decode")
    registry = collect(tmp_path)
    steps = registry.get_sample_value("rbln_bucket_steps_total", {"phase": "decode", "bucket": "8"})
    graphs = registry.get_sample_value("rbln_graphs", {"kind": "decode", "result": "loaded"})
    unused = registry.get_sample_value("rbln_recompiles_after_warmup_total", {"kind": "decode"})
    assert (steps, graphs, unused) == (3.0, 5.0, 0.0)
    # A restarted rank starts from zero.
    MetricsBoard(tmp_path, 0).counter("rbln_bucket_steps_total", phase="decode", bucket=8).inc(7)
    found = collect(tmp_path).get_sample_value
    assert found("rbln_bucket_steps_total", {"phase": "decode", "bucket": "8"}) == 7


def test_help_and_type_are_collected(tmp_path: Path) -> None:
    board = MetricsBoard(tmp_path, 0)
    for metric in METRICS:
        labels = dict.fromkeys(metric.labels, "x")
        if metric.kind == "counter":
            board.counter(metric.name, **labels).inc()
        elif metric.kind == "gauge":
            board.gauge(metric.name, **labels).set(1)
        else:
            board.histogram(metric.name, **labels).observe(1)
    families = {family.name: family for family in collect(tmp_path).collect()}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)


def test_a_histogram_is_cumulative_with_sum_and_count(tmp_path: Path) -> None:
    wait = MetricsBoard(tmp_path, 0).histogram("rbln_compile_cache_lock_wait_seconds")
    for seconds in (0.001, 0.5, 0.7, 1000.0):
        wait.observe(seconds)
    registry = collect(tmp_path)
    name = "rbln_compile_cache_lock_wait_seconds"
    bucket = {
        bound: registry.get_sample_value(f"{name}_bucket", {"le": bound})
        for bound in ("0.001", "0.1", "1.0", "900.0", "+Inf")
    }
    assert bucket == {"0.001": 1, "0.1": 1, "1.0": 3, "900.0": 3, "+Inf": 4}
    assert registry.get_sample_value(f"{name}_count") == 4
    assert registry.get_sample_value(f"{name}_sum") == pytest.approx(1001.201)


def test_counters_of_ranks_add_up_and_gauges_follow_their_mode(tmp_path: Path) -> None:
    boards = [MetricsBoard(tmp_path, rank) for rank in range(2)]
    for value, board in zip((1.0, 2.0), reversed(boards), strict=True):
        board.counter("rbln_compile_cache_requests_total", result="hit").inc(value)
        board.gauge("rbln_device_memory_bytes", kind="kv").set(100)
        board.gauge("rbln_engine_last_step_timestamp_seconds", engine=0).set(50 - value)
        board.gauge("rbln_compile_cache_entries").set(value)
    registry = collect(tmp_path)
    assert registry.get_sample_value("rbln_compile_cache_requests_total", {"result": "hit"}) == 3
    assert registry.get_sample_value("rbln_device_memory_bytes", {"kind": "kv"}) == 200
    latest = registry.get_sample_value("rbln_engine_last_step_timestamp_seconds", {"engine": "0"})
    assert latest == 49
    assert registry.get_sample_value("rbln_compile_cache_entries") == 2


def test_a_collector_works_while_boards_come_and_grow(tmp_path: Path) -> None:
    MetricsBoard(tmp_path, 0)
    registry = collect(tmp_path)
    stop = threading.Event()

    def restart_and_grow() -> None:
        rank = 0
        while not stop.is_set():
            board = MetricsBoard(tmp_path, rank % 3)
            for chunk in range(400):
                board.counter("rbln_prefill_padded_tokens_total", chunk=chunk).inc()
            rank += 1

    thread = threading.Thread(target=restart_and_grow)
    thread.start()
    try:
        for _ in range(30):
            list(registry.collect())
    finally:
        stop.set()
        thread.join()


def test_without_run_dir_values_stay_readable() -> None:
    board = MetricsBoard(None, 0)
    board.counter("rbln_compile_cache_requests_total", result="miss").inc(2)
    board.gauge("rbln_compile_cache_size_bytes").set(17)
    board.histogram("rbln_compile_seconds", kind="decode", result="compiled").observe(0.3)
    assert board.value("rbln_compile_cache_requests_total", result="miss") == 2
    assert board.value("rbln_compile_cache_size_bytes") == 17
    assert board.value("rbln_compile_seconds", kind="decode", result="compiled") == 1
    assert board.value("rbln_compile_cache_requests_total", result="hit") == 0


def test_values_stay_readable_after_close(tmp_path: Path) -> None:
    board = MetricsBoard(tmp_path, 0)
    counter = board.counter("rbln_compile_cache_writes_total", result="stored")
    counter.inc()
    board.close()
    counter.inc()
    assert board.value("rbln_compile_cache_writes_total", result="stored") == 2
    value = collect(tmp_path).get_sample_value(
        "rbln_compile_cache_writes_total", {"result": "stored"}
    )
    assert value == 1


def test_increments_from_threads_are_not_lost(tmp_path: Path) -> None:
    counter = MetricsBoard(tmp_path, 0).counter("rbln_compile_cache_writes_total", result="failed")

    def increment() -> None:
        for _ in range(2000):
            counter.inc()

    threads = [threading.Thread(target=increment) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value == 8000


def test_an_undeclared_name_kind_or_label_is_refused() -> None:
    board = MetricsBoard(None, 0)
    with pytest.raises(ValueError, match="'rbln_surprise' is not declared"):
        board.counter("rbln_surprise")
    with pytest.raises(ValueError, match="rbln_graphs is a gauge, not a counter"):
        board.counter("rbln_graphs", kind="decode", result="loaded")
    with pytest.raises(ValueError, match="has the labels"):
        board.gauge("rbln_graphs", kind="decode")
    with pytest.raises(ValueError, match="only grows, got -1"):
        board.counter("rbln_compile_cache_writes_total", result="stored").inc(-1)


# ------------------------------------------------------------------------------------- store report
FIELDS: dict[str, Any] = {"architecture": "LlamaForCausalLM", "dtype": "torch.bfloat16"}
FIELDS |= {"device": {"device": "emulated", "kernels": "native"}}
FIELDS |= {"max_model_len": 2048, "backend_sources": "a" * 64}


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


# ------------------------------------------------------------------------------------ computed rows
ROWS = "rbln_bucket_useful_rows_total"


def test_rows_of_all_engines_add_up(tmp_path: Path) -> None:
    assert computed_rows(tmp_path, 1) is None
    boards = [MetricsBoard(tmp_path, rank) for rank in range(3)]
    # The third is of a rank whose engine's steps another rank counts.
    boards[2].counter("rbln_recompiles_after_warmup_total", kind="decode").inc()
    counters = [
        board.counter(ROWS, phase=phase, bucket="4")
        for board in boards[:2]
        for phase in ("decode", "prefill")
    ]
    assert computed_rows(tmp_path, 2) == 0.0
    for number, counter in enumerate(counters):
        counter.inc(number)
    boards[0].counter("rbln_bucket_padded_rows_total", phase="decode", bucket="4").inc(50)
    assert computed_rows(tmp_path, 2) == 6.0


def test_nothing_is_known_where_an_engine_is_on_another_host(tmp_path: Path) -> None:
    MetricsBoard(tmp_path, 0).counter(ROWS, phase="decode", bucket="4").inc()
    assert computed_rows(tmp_path, 1) == 1.0
    assert computed_rows(tmp_path, 2) is None


# ------------------------------------------------------------------------------------- draft counts
def test_drafts_are_counted_by_size() -> None:
    board = MetricsBoard(None, 0)
    counts = DraftCounts(board, [(1, 4), (8, 4)])
    counts.record((8, 4), checked=20, accepted=7, gain=1.25)
    counts.record((8, 4), checked=10, accepted=0, gain=0.5)
    assert board.value("rbln_draft_tokens_total", bucket="8x4") == 30
    assert board.value("rbln_draft_accepted_tokens_total", bucket="8x4") == 7
    assert board.value("rbln_draft_gain_total", bucket="8x4") == 1.75
    assert board.value("rbln_draft_tokens_total", bucket="1x4") == 0
