"""Several engines of several ranks in one run directory: what is counted once, and what by each."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.reports.info import DescriptionWriter, read_descriptions
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.reports.progress import ProgressReader, ProgressWriter, RankPlace
from rbln_backend.worker.metrics import StepMetrics
from rbln_backend.worker.sampling import GrammarMask

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


def test_no_two_workers_of_an_instance_have_the_same_number() -> None:
    assert [place.number for place in PLACES] == list(range(ENGINES * RANKS))


@pytest.mark.parametrize("tensor_ranks", [1, 2, 4])
def test_one_rank_of_an_engine_counts(tensor_ranks: int) -> None:
    places = [RankPlace(rank=n, ranks=4, tensor_ranks=tensor_ranks) for n in range(4)]
    assert [place.rank for place in places if place.counts_steps] == [0]
    # The first of the last stage: the one whose output vLLM's executor takes.
    assert [place.rank for place in places if place.replies] == [4 - tensor_ranks]


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
