"""Workers tell their start-up; the API process folds the stories of all ranks."""

import io
import json
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.reports import progress
from rbln_backend.reports.info import DescriptionWriter, LimitsInfo, read_descriptions
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.reports.progress import (
    GraphProgress,
    LastStart,
    ProgressReader,
    ProgressWriter,
    RankPlace,
)
from rbln_backend.worker.metrics import StepMetrics
from rbln_backend.worker.sampling import GrammarMask


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(run_dir: Path, rank: int = 0) -> list[dict[str, object]]:
    text = (run_dir / f"progress-{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_each_call_appends_one_line_of_the_schema(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path, 3, None)
    with pytest.raises(ValueError, match="'boiling', valid choices: init, load, compile"):
        writer.phase("boiling")
    writer.phase("compile", "5 graphs")
    writer.plan(["decode-1"])
    writer.graph_started("decode-1")
    writer.graph_done("decode-1", "compiled", 0.25)
    events = lines_of(tmp_path, 3)
    assert all(isinstance(event.pop("time"), float) for event in events)
    assert events == [
        {"event": "phase", "name": "compile", "detail": "5 graphs"},
        {"event": "plan", "graphs": ["decode-1"], "workers": 1},
        {"event": "graph_started", "name": "decode-1"},
        {"event": "graph_done", "name": "decode-1", "result": "compiled", "seconds": 0.25},
    ]


def test_an_unwritable_run_dir_does_not_stop_a_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = BufferingHandler(capacity=9)
    # Of this module's own logger: where records go from there, tests of the process may change.
    monkeypatch.setattr(progress.logger, "handlers", [records])
    (tmp_path / "file").write_text("")
    writer = ProgressWriter(tmp_path / "file" / "run", 0, None)
    writer.phase("init")
    (record,) = records.buffer
    assert "No start-up progress for other processes" in record.getMessage()


def test_a_closed_terminal_does_not_stop_a_start_up(tmp_path: Path) -> None:
    terminal = io.StringIO()
    writer = ProgressWriter(tmp_path, 0, terminal)
    terminal.close()
    writer.phase("init")
    writer.phase("load")
    assert [event["name"] for event in lines_of(tmp_path)] == ["init", "load"]


def test_a_pipe_gets_a_line_every_five_seconds_and_one_for_all_graphs() -> None:
    out, now = io.StringIO(), [0.0]
    writer = ProgressWriter(None, 0, out, clock=lambda: now[0])
    writer.phase("init")
    writer.step("files", 1, 9)
    writer.phase("load", "weights")
    names = ["prefill-128", "decode-1", "decode-8"]
    writer.plan(names)
    for name, at in zip(names, (4.9, 5.1, 7.25), strict=True):
        now[0] = at
        writer.graph_done(name, "loaded" if at < 5 else "compiled", 1.0)
    writer.phase("ready")
    assert out.getvalue().splitlines() == [
        "rbln: load: weights",
        "rbln: compile: 2 of 3 graphs, decode-1 compiled",
        "rbln: compile: 3 graphs: 2 compiled, 1 loaded in 7.2 s",
        "rbln: ready",
    ]


def test_a_tty_gets_one_bar_that_ends_with_a_newline() -> None:
    out, now = Terminal(), [0.0]
    writer = ProgressWriter(None, 0, out, clock=lambda: now[0])
    writer.plan(["a", "b"])
    writer.graph_started("a")
    writer.graph_done("a", "compiled", 1.0)
    writer.graph_started("b")
    assert "\n" not in out.getvalue()
    now[0] = 1.5
    writer.graph_done("b", "loaded", 0.5)
    frames = out.getvalue().split("\r")
    assert frames[2] == "[############............] 1/2 a compiled in 1.00 s\x1b[K"
    last = "[########################] 2/2 graphs: 1 compiled, 1 loaded in 1.5 s\x1b[K\n"
    assert frames[-1] == last


def test_a_tty_sees_how_far_a_phase_is_in_a_line_that_the_next_replaces() -> None:
    out = Terminal()
    writer = ProgressWriter(None, 0, out)
    writer.step("kernels: files", 1, 9)
    writer.phase("load", "weights")
    drawn = "\rrbln: kernels: files: 1 of 9\x1b[K"
    assert out.getvalue() == f"{drawn}\r\x1b[Krbln: load: weights\n"


def test_a_reader_before_any_event_sees_the_beginning(tmp_path: Path) -> None:
    snapshot = ProgressReader(tmp_path / "not there yet").poll()
    assert (snapshot.phase, snapshot.graphs_total, snapshot.updated) == ("init", 0, None)
    assert snapshot.eta_s is None


def test_polls_fold_what_is_new(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path, 0, None)
    reader = ProgressReader(tmp_path, clock=lambda: 0.0)
    writer.phase("compile", "two graphs")
    writer.plan(["a", "b"])
    assert reader.poll().graphs == [GraphProgress(n, "pending", None, None) for n in "ab"]
    writer.graph_started("a")
    assert reader.poll().graphs[0].state == "running"
    writer.graph_done("a", "loaded", 0.5)
    snapshot = reader.poll()
    assert snapshot.graphs[0] == GraphProgress("a", "done", "loaded", 0.5)
    assert (snapshot.phase, snapshot.detail) == ("compile", "two graphs")
    assert (snapshot.graphs_done, snapshot.graphs_total) == (1, 2)
    assert reader.poll() == snapshot


def test_a_half_written_line_waits_for_its_rest(tmp_path: Path) -> None:
    path, reader = tmp_path / "progress-0.jsonl", ProgressReader(tmp_path)
    line = json.dumps({"time": 5.0, "event": "phase", "name": "load", "detail": ""}) + "\n"
    path.write_text(line[:20])
    assert reader.poll().phase == "init"
    path.write_text(line)
    assert reader.poll().phase == "load"


def test_malformed_lines_and_unknown_phases_are_skipped(tmp_path: Path) -> None:
    good, bad = (
        json.dumps({"time": 5.0, "event": "phase", "name": name, "detail": ""})
        for name in ("load", "boiling")
    )
    (tmp_path / "progress-0.jsonl").write_text(f'nonsense\n{{"time": 1}}\n[]\n{good}\n{bad}\n')
    assert ProgressReader(tmp_path).poll().phase == "load"


def test_ranks_fold_into_the_slowest(tmp_path: Path) -> None:
    first, second = (ProgressWriter(tmp_path, rank, None) for rank in (0, 1))
    for writer in (first, second):
        writer.plan(["a", "b", "c"])
    first.phase("warmup", "rank 0")
    second.phase("compile", "rank 1")
    first.graph_done("a", "loaded", 1.0)
    second.graph_done("a", "compiled", 3.0)
    first.graph_done("b", "compiled", 1.0)
    snapshot = ProgressReader(tmp_path).poll()
    assert (snapshot.phase, snapshot.detail) == ("compile", "rank 1")
    assert snapshot.graphs == [
        GraphProgress("a", "done", "compiled", 3.0),
        GraphProgress("b", "running", None, None),
        GraphProgress("c", "pending", None, None),
    ]
    assert (snapshot.graphs_done, snapshot.graphs_total) == (1, 3)


def test_a_restarted_rank_begins_anew(tmp_path: Path) -> None:
    reader, writer = ProgressReader(tmp_path), ProgressWriter(tmp_path, 0, None)
    writer.phase("compile")
    writer.plan(["a"])
    writer.graph_done("a", "compiled", 1.0)
    assert reader.poll().graphs_done == 1
    ProgressWriter(tmp_path, 0, None).phase("init")
    snapshot = reader.poll()
    assert (snapshot.phase, snapshot.graphs_total) == ("init", 0)


def test_the_eta_is_the_mean_pace_less_the_time_since(tmp_path: Path) -> None:
    now = [0.0]
    reader = ProgressReader(tmp_path, clock=lambda: now[0])
    writer = ProgressWriter(tmp_path, 0, None)
    writer.phase("compile")
    writer.plan(["a", "b", "c", "d"])
    assert reader.poll().eta_s is None
    writer.graph_done("a", "compiled", 10.0)
    writer.graph_done("b", "compiled", 20.0)
    updated = reader.poll().updated
    assert updated is not None
    now[0] = updated + 4.0
    assert reader.poll().eta_s == pytest.approx(2 * 15.0 - 4.0)
    now[0] = updated + 99.0
    assert reader.poll().eta_s == 0.0
    writer.phase("ready")
    assert reader.poll().eta_s == 0.0


def test_the_eta_counts_the_workers_and_not_what_was_loaded(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path, clock=lambda: 0.0)
    writer = ProgressWriter(tmp_path, 0, None)
    writer.phase("compile")
    writer.plan(["a", "b", "c", "d", "e"], workers=2)
    writer.graph_done("a", "loaded", 0.01)
    writer.graph_done("b", "compiled", 8.0)
    assert reader.poll().eta_s == pytest.approx(3 / 2 * 8.0)
    writer.graph_done("d", "compiled", 8.0)
    writer.graph_done("c", "compiled", 8.0)
    # One graph takes its time, however many could be compiled.
    assert reader.poll().eta_s == pytest.approx(8.0)
    writer.graph_done("e", "compiled", 8.0)
    assert reader.poll().eta_s == 0.0


def test_a_failure_is_told_with_its_reason_until_the_rank_begins_anew(tmp_path: Path) -> None:
    writer, reader = ProgressWriter(tmp_path, 0, None), ProgressReader(tmp_path)
    ProgressWriter(tmp_path, 1, None).phase("init")
    with pytest.raises(UnsupportedModelError), writer.reporting_failure():
        raise UnsupportedModelError("no op for this")
    assert reader.poll().failure == "no op for this"
    writer.phase("init")
    assert reader.poll().failure is None
    with pytest.raises(KeyError), writer.reporting_failure():
        raise KeyError("weight")
    assert reader.poll().failure == "KeyError: 'weight'"


def test_a_phase_with_steps_has_their_pace(tmp_path: Path) -> None:
    now = [0.0]
    reader = ProgressReader(tmp_path, clock=lambda: now[0])
    writer = ProgressWriter(tmp_path, 0, None)
    writer.phase("init")
    updated = reader.poll().updated
    assert updated is not None
    now[0] = updated + 5.0
    assert reader.poll().eta_s is None
    writer.step("kernels", 1, 4)
    assert reader.poll().eta_s == pytest.approx(15.0, abs=1.0)
    assert reader.poll().detail == "kernels: 1 of 4"
    writer.phase("load")
    assert reader.poll().eta_s is None


# -------------------------------------------------------------------------------------------- ranks
ENGINES, STAGES, TENSOR = 2, 2, 2
RANKS = STAGES * TENSOR
PLACES = [
    RankPlace(engine=engine, rank=rank, ranks=RANKS, tensor_ranks=TENSOR)
    for engine in range(ENGINES)
    for rank in range(RANKS)
]
DECODE = GraphSpec.of(Phase.DECODE, 8)
PREFILL = GraphSpec.of(Phase.PREFILL, 64)


def value(run_dir: Path, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(run_dir / "metrics"))  # type: ignore[no-untyped-call]
    return registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("rank", "ranks", "tensor_ranks", "engine"), [(2, 2, 1, 0), (0, 3, 2, 0), (0, 1, 1, -1)]
)
def test_impossible_places_are_refused(
    rank: int, ranks: int, tensor_ranks: int, engine: int
) -> None:
    with pytest.raises(ValueError, match="rank"):
        RankPlace(engine=engine, rank=rank, ranks=ranks, tensor_ranks=tensor_ranks)


def test_steps_are_counted_once_an_engine_and_compiles_once_a_rank(tmp_path: Path) -> None:
    for place in PLACES:
        board = MetricsBoard(tmp_path, place.number)
        board.histogram("rbln_compile_seconds", kind="decode", result="compiled").observe(1)
        board.counter("rbln_recompiles_after_warmup_total", kind="decode")
        board.gauge("rbln_graphs", kind="decode", result="compiled").set(5)
        board.gauge("rbln_device_memory_bytes", kind="weights").set(10)
        board.gauge("rbln_lora_slots").set(4)
        board.gauge("rbln_lora_slots_used").set(place.engine + 1)
        steps = StepMetrics(
            board.only_if(place.counts_steps), [DECODE, PREFILL], engine=place.engine
        )
        mask = GrammarMask(board.only_if(place.replies))
        for _ in range(3):
            steps.record(DECODE, 5, 5, 0.01)
            mask._seconds.observe(0.001)
        steps.record(PREFILL, 1, 60, 0.1)
    decode = {"phase": "decode", "bucket": "8"}
    assert value(tmp_path, "rbln_bucket_steps_total", **decode) == 3 * ENGINES
    assert value(tmp_path, "rbln_bucket_step_seconds_count", **decode) == 3 * ENGINES
    assert value(tmp_path, "rbln_bucket_useful_rows_total", **decode) == 15 * ENGINES
    assert value(tmp_path, "rbln_bucket_padded_rows_total", **decode) == 9 * ENGINES
    assert value(tmp_path, "rbln_prefill_padded_tokens_total", chunk="64") == 4 * ENGINES
    assert value(tmp_path, "rbln_grammar_mask_seconds_count", part="apply") == 3 * ENGINES
    compiled = {"kind": "decode", "result": "compiled"}
    assert value(tmp_path, "rbln_compile_seconds_count", **compiled) == len(PLACES)
    assert value(tmp_path, "rbln_graphs", **compiled) == 5
    assert value(tmp_path, "rbln_device_memory_bytes", kind="weights") == 10 * len(PLACES)
    assert value(tmp_path, "rbln_lora_slots") == 4
    assert value(tmp_path, "rbln_lora_slots_used") == ENGINES


def test_an_engine_that_stands_still_is_not_hidden_by_one_that_moves(tmp_path: Path) -> None:
    metrics = [StepMetrics(MetricsBoard(tmp_path, n), [DECODE], engine=n) for n in range(2)]
    name = "rbln_engine_last_step_timestamp_seconds"
    ready = [value(tmp_path, name, engine=str(n)) for n in range(2)]
    # There before the first step: an engine that never makes one is seen as well.
    assert None not in ready
    metrics[1].record(DECODE, 1, 1, 0.01)
    now = [value(tmp_path, name, engine=str(n)) for n in range(2)]
    assert now[0] == ready[0]
    assert (now[1] or 0) > (ready[1] or 0)


def test_stories_and_descriptions_of_all_ranks_are_kept_apart(tmp_path: Path) -> None:
    for place in PLACES:
        DescriptionWriter(tmp_path, place.number).write("phases", {"init": float(place.number)})
        writer = ProgressWriter(tmp_path, place.number, None)
        writer.phase("compile")
        writer.plan(["decode-8", "prefill-64"])
        writer.graph_done("prefill-64", "compiled", 1.0 + place.number)
        if place.number != 5:
            writer.graph_done("decode-8", "loaded", 0.1)
            writer.phase("ready")
        writer.close()
    told = read_descriptions(tmp_path)
    assert [rank["phases"]["init"] for rank in told] == list(range(len(PLACES)))
    story = ProgressReader(tmp_path).poll()
    assert (story.phase, story.graphs_done, story.graphs_total) == ("compile", 1, 2)
    assert {g.name: g.seconds for g in story.graphs}["prefill-64"] == len(PLACES)


# -------------------------------------------------------------------------------------- description
LIMITS = LimitsInfo(max_model_len=8, max_num_seqs=2, max_num_batched_tokens=4)


def test_sections_add_up_and_are_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert read_descriptions(run_dir) == []
    writer = DescriptionWriter(run_dir, 0)
    writer.write("limits", LIMITS)
    writer.write("phases", {"init": 1.0})
    writer.write("phases", {"init": 1.0, "load": 2.0})
    assert read_descriptions(run_dir) == [
        {
            "limits": {"max_model_len": 8, "max_num_seqs": 2, "max_num_batched_tokens": 4},
            "phases": {"init": 1.0, "load": 2.0},
        }
    ]
    # Ranks come in the order of their numbers.
    for rank in (10, 2, 0):
        DescriptionWriter(tmp_path, rank).write("phases", {"rank": rank})
    assert [told["phases"]["rank"] for told in read_descriptions(tmp_path)] == [0, 2, 10]


def test_a_change_never_touches_the_file_that_a_reader_has_open(tmp_path: Path) -> None:
    writer = DescriptionWriter(tmp_path, 0)
    writer.write("phases", {"init": 1.0})
    with (tmp_path / "describe-0.json").open() as before:
        writer.write("phases", {"init": 1.0, "load": 22.0})
        assert json.load(before) == {"phases": {"init": 1.0}}
    assert [path.name for path in tmp_path.iterdir()] == ["describe-0.json"]


def test_neither_a_bad_disk_nor_a_bad_file_raises(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    DescriptionWriter(blocker, 0).write("limits", LIMITS)
    DescriptionWriter(None, 0).write("limits", LIMITS)
    (tmp_path / "describe-0.json").write_text("{")
    assert read_descriptions(tmp_path) == []


# --------------------------------------------------------------------------------------- last start
def test_the_last_start_is_known_below_its_cache_root(tmp_path: Path) -> None:
    assert LastStart(tmp_path).seconds() is None
    LastStart(tmp_path).keep(9.0)
    LastStart(tmp_path).keep(4.25)
    assert LastStart(tmp_path).seconds() == 4.25
    assert LastStart(tmp_path / "other").seconds() is None
    # A folder that cannot be written is ignored.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rbln").write_text("not a folder")
    LastStart(tmp_path / "other").keep(2.0)
    assert LastStart(tmp_path / "other").seconds() is None


@pytest.mark.parametrize(
    "content", ["", "null", "[" * 100_000, '"4"', "-1.0", "1e400", "NaN", "\xff", "{}"]
)
def test_a_damaged_file_is_ignored(content: str, tmp_path: Path) -> None:
    file = tmp_path / "rbln" / "last_start.json"
    file.parent.mkdir()
    file.write_text(content, encoding="latin-1")
    assert LastStart(tmp_path).seconds() is None
    LastStart(tmp_path).keep(2.0)
    assert LastStart(tmp_path).seconds() == 2.0
