"""Part of a comparison in process: decode steps and prefill."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.compare.plans import (
    DECODE_BATCHES,
    KV_CACHE_BYTES,
    MAX_MODEL_LEN,
    PROMPT_TOKENS,
    Plan,
)
from benchmarks.engines.engine_process import EngineProcess, EngineProcessError
from benchmarks.engines.sides import StepModel, StepSide
from benchmarks.models.shapes import Checkpoint
from benchmarks.runner.command import repeat_disturbed, rotated, say
from benchmarks.runner.machine import ChildMeter, ModelWork, busy_cpu_seconds, measure_limits
from benchmarks.runner.records import (
    EngineRecord,
    Failure,
    LimitsRecord,
    Log,
    ModelRecord,
    StepRecord,
)

PART = "steps"
_WARM_UP = (4, 4)  # prompt and output tokens
_LOWEST_TOKEN = 300  # above the special tokens and single bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One model of a comparison in both forms, with its measuring plan."""

    checkpoint: Checkpoint
    text_model: Path
    gguf: Path
    work: ModelWork
    plan: Plan

    @property
    def name(self) -> str:
        return self.checkpoint.name


@dataclass(frozen=True, slots=True)
class _Cell:
    batch: int
    prompt_tokens: int
    output_tokens: int


def log_model(log: Log, subject: Subject, path: Path, **step_bytes: int) -> None:
    """Record the model of a run; `step_bytes` are bytes per decode step by side."""
    log.add(
        ModelRecord(
            model=subject.name,
            path=str(path),
            parameters=subject.checkpoint.parameters,
            work=asdict(subject.work) | step_bytes,
        )
    )


def measure_round_limits(log: Log, subject: Subject, round_number: int, part: str) -> None:
    """Measure and record the machine's limits; every engine has to be stopped."""

    def take(_: int) -> LimitsRecord:
        meter = ChildMeter()
        limits = measure_limits(subject.work.weight_bytes)
        return LimitsRecord(
            model=subject.name,
            round=round_number,
            part=part,
            bytes_per_s=limits.bytes_per_s,
            flops_per_s=limits.flops_per_s,
            unit=limits.unit,
            other_busy_cores=meter.other_busy_cores(),
        )

    for record in repeat_disturbed(take):
        log.add(record)


def measure_steps(log: Log, subject: Subject, sides: Sequence[StepSide], logs: Path) -> None:
    """Measure every side round by round; a failing side is recorded and skipped afterwards."""
    model = StepModel(
        text_model=subject.text_model,
        gguf=subject.gguf,
        max_batch=max(DECODE_BATCHES),
        max_length=MAX_MODEL_LEN,
        kv_cache_bytes=KV_CACHE_BYTES,
    )
    plan = subject.plan
    cells = [_Cell(batch, PROMPT_TOKENS, plan.step_tokens) for batch in DECODE_BATCHES]
    cells += [_Cell(1, tokens, 1) for tokens in plan.prefill_tokens]
    with ExitStack() as stack:
        engines = _start(log, subject, sides, model, stack, logs)
        for round_number in range(1, plan.rounds + 1):
            measure_round_limits(log, subject, round_number, PART)
            for cell in cells:
                for engine in rotated(engines, round_number):
                    take = partial(_sample, engine, subject, round_number, cell)
                    try:
                        records = repeat_disturbed(take)
                    except EngineProcessError as error:
                        _fail(log, subject, engine.side.name, error)
                        engines.remove(engine)
                        continue
                    for record in records:
                        log.add(record)
                    _log_record(records[-1])


def _start(
    log: Log,
    subject: Subject,
    sides: Sequence[StepSide],
    model: StepModel,
    stack: ExitStack,
    logs: Path,
) -> list[EngineProcess]:
    engines = []
    for side in sides:
        name = side.side.name
        say(f"  starting {name}")
        process = EngineProcess(
            side.side, side.arguments(model), logs / f"{subject.name}-steps-{name}.log"
        )
        try:
            engines.append(stack.enter_context(process))
        except (EngineProcessError, OSError) as error:
            _fail(log, subject, name, error)
            continue
        about = process.description | asdict(process.memory())
        log.add(EngineRecord(model=subject.name, part=PART, side=name, about=about))
    return engines


def _fail(log: Log, subject: Subject, side: str, error: Exception) -> None:
    say(f"  {side} failed: {str(error).splitlines()[0]}")
    log.add(Failure(model=subject.name, part=PART, side=side, text=str(error)))


def _sample(
    engine: EngineProcess, subject: Subject, round_number: int, cell: _Cell, attempt: int
) -> StepRecord:
    # Every side gets the same prompts; no two rounds do.
    chooser = random.Random(f"{round_number} {attempt} {cell}")

    def prompt(length: int) -> list[int]:
        return [
            chooser.randrange(_LOWEST_TOKEN, subject.checkpoint.vocab_size) for _ in range(length)
        ]

    prompts = [prompt(cell.prompt_tokens) for _ in range(cell.batch)]
    budget = subject.plan.step_budget_s
    with engine.awake():
        # Caches and pages of an engine that slept are cold, unlike those of a busy one.
        engine.ask_within([prompt(_WARM_UP[0])], _WARM_UP[1], budget)
        wall, own, all_busy = time.perf_counter(), engine.cpu_seconds(), busy_cpu_seconds()
        answer = engine.ask_within(prompts, cell.output_tokens, budget)
        wall = time.perf_counter() - wall
        own = engine.cpu_seconds() - own
        all_busy = busy_cpu_seconds() - all_busy
    return StepRecord(
        model=subject.name,
        round=round_number,
        side=engine.side.name,
        batch=cell.batch,
        prompt_tokens=cell.prompt_tokens,
        output_tokens=cell.output_tokens,
        seconds=answer["seconds"],
        first_token_seconds=answer["first_token_seconds"],
        step_seconds=[round(seconds, 6) for seconds in answer["step_seconds"]],
        first_tokens=[row[0] for row in answer["tokens"] if row],
        other_busy_cores=max(0.0, all_busy - own) / wall,
    )


def _log_record(record: StepRecord) -> None:
    if record.output_tokens == 1:
        seconds = record.prefill
        what = "cut off" if seconds is None else f"{record.prompt_tokens / seconds:.0f} tokens/s"
        say(f"  round {record.round} prefill {record.prompt_tokens} {record.side}: {what}")
        return
    step = record.step
    what = "cut off" if step is None else f"{1000 * step:.3f} ms/step"
    say(f"  round {record.round} batch {record.batch} {record.side}: {what}")
