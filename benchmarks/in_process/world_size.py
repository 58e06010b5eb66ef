"""Cost of several ranks on one machine, alternating in one run.

``python -m benchmarks world_size --model 160m --batch 1 8 --save``. All arrangements share the
machine's cores, so the figures show the cost of ranks, not their gain.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engines.engine_process import OURS, EngineProcess, Side
from benchmarks.models.shapes import Checkpoint, find_checkpoint
from benchmarks.runner.command import (
    Command,
    RunHeader,
    add_model_and_batch,
    begin,
    disturbance,
    heading,
    positive,
    rotated,
    say,
    started,
)
from benchmarks.runner.machine import busy_cpu_seconds

MAX_MODEL_LEN = 512
KV_CACHE_BYTES = 1 << 28
BUDGET_SECONDS = 60.0
PROMPT_TOKENS = 32
ARRANGEMENTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "TP=2": {"tensor_parallel_size": 2},
    "PP=2": {"pipeline_parallel_size": 2},
    "TP=2 x PP=2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One batch of one arrangement in one round.

    `step_ms` is the time from submission to the end over the tokens of a request, including
    prefill, because tokens of a small model arrive in bursts. `cpu_ms` is the CPU time of all
    processes of the engine.
    """

    arrangement: str
    round: int
    batch: int
    step_ms: float
    cpu_ms: float
    other_busy_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command."""

    model: str
    parameters: int
    arrangements: list[str]
    samples: list[Sample]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("world_size", _parser(), _measure, markdown).main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks world_size", description=__doc__)
    add_model_and_batch(parser, "160m")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--output-tokens", type=positive, default=128, help="default: 128")
    return parser


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    samples: list[Sample] = []
    processes = (_engine(name, checkpoint, max(args.batch)) for name in ARRANGEMENTS)
    with started(processes) as engines:
        for number in range(1, args.rounds + 1):
            for batch in args.batch:
                for engine in rotated(engines, number):
                    samples.append(_sample(engine, checkpoint, number, batch, args.output_tokens))
                    say(f"  round {number} batch {batch} {engine.side.name}: {samples[-1].step_ms}")
    return Run(
        **begun,
        model=checkpoint.name,
        parameters=checkpoint.parameters,
        arrangements=list(ARRANGEMENTS),
        samples=samples,
    )


def _engine(name: str, checkpoint: Checkpoint, batch: int) -> EngineProcess:
    arguments: dict[str, Any] = {
        "model": str(checkpoint.path),
        "max_model_len": MAX_MODEL_LEN,
        # A stage runs its part of the requests, so all arrangements have the same graphs.
        "max_num_seqs": 2 * batch,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "skip_tokenizer_init": True,
        "seed": 0,
        **ARRANGEMENTS[name],
    }
    side = Side(name=name, platform=OURS.platform, env=OURS.env, note=OURS.note)
    return EngineProcess(side, arguments)


def _sample(
    engine: EngineProcess, checkpoint: Checkpoint, number: int, batch: int, output_tokens: int
) -> Sample:
    prompts = [
        [
            (number * 997 + row * 131 + i * 7) % (checkpoint.vocab_size - 3) + 3
            for i in range(PROMPT_TOKENS)
        ]
        for row in range(batch)
    ]
    own, all_busy = engine.cpu_seconds(), busy_cpu_seconds()
    with engine.awake():
        answer = engine.ask_within(prompts, output_tokens, BUDGET_SECONDS)
    own, all_busy = engine.cpu_seconds() - own, busy_cpu_seconds() - all_busy
    steps = len(answer["tokens"][0])
    return Sample(
        arrangement=engine.side.name,
        round=number,
        batch=batch,
        step_ms=round(1000 * answer["seconds"] / steps, 3),
        cpu_ms=round(1000 * own / steps, 3),
        other_busy_cores=max(0.0, all_busy - own) / answer["seconds"],
    )


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        *heading("Steps by world size", run),
        f"- Model {run.model}, {run.parameters / 1e6:.1f}M parameters. Ranks divide the cores.",
        f"- {disturbance([sample.other_busy_cores for sample in run.samples])}",
    ]
    for batch in sorted({sample.batch for sample in run.samples}):
        lines += ["", f"## Batch {batch}", "", *_table(run, batch)]
    return "\n".join(lines) + "\n"


def _table(run: Run, batch: int) -> list[str]:
    rows = [
        "Milliseconds per token of every request, prefill included, medians over the rounds.",
        "",
        "| ranks | step | least | processor time | tokens/s | step of one rank over it |",
        "|---|---|---|---|---|---|",
    ]
    alone = None
    for name in run.arrangements:
        mine = [s for s in run.samples if (s.batch, s.arrangement) == (batch, name)]
        step = statistics.median(s.step_ms for s in mine)
        alone = alone or step
        least, cpu = min(s.step_ms for s in mine), statistics.median(s.cpu_ms for s in mine)
        rates = f"{1000 * batch / step:.0f} | {alone / step:.2f}"
        rows.append(f"| {name} | {step:.2f} | {least:.2f} | {cpu:.2f} | {rates} |")
    return rows
