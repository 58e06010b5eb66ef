"""Measures what more ranks cost or gain on one machine: every arrangement in turn, in one run.

``python -m benchmarks world_size --model 160m --batch 1 8 --save``. All arrangements share the
machine's cores, so that no gain is to be expected here: the figures show what ranks cost.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines.engine_process import OURS, EngineProcess, Side
from benchmarks.in_process.world_size_report import Run, Sample, markdown
from benchmarks.models.shapes import Checkpoint, find_checkpoint
from benchmarks.runner.command import Command, add_model_and_batch, begin, positive, rotated, say
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
    with tempfile.TemporaryDirectory(prefix="rbln-ranks-") as logs, ExitStack() as stack:
        engines = [
            stack.enter_context(_engine(name, checkpoint, max(args.batch), Path(logs)))
            for name in ARRANGEMENTS
        ]
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


def _engine(name: str, checkpoint: Checkpoint, batch: int, logs: Path) -> EngineProcess:
    say(f"starting {name}")
    arguments: dict[str, Any] = {
        "model": str(checkpoint.path),
        "max_model_len": MAX_MODEL_LEN,
        # A stage takes its part of the requests, so that all arrangements have the same graphs.
        "max_num_seqs": 2 * batch,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "skip_tokenizer_init": True,
        "seed": 0,
        **ARRANGEMENTS[name],
    }
    side = Side(name=name, platform=OURS.platform, env=OURS.env, note=OURS.note)
    return EngineProcess(side, arguments, logs / f"{name.replace(' ', '-')}.log")


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
    own, everybody = engine.cpu_seconds(), busy_cpu_seconds()
    with engine.awake():
        answer = engine.ask_within(prompts, output_tokens, BUDGET_SECONDS)
    own, everybody = engine.cpu_seconds() - own, busy_cpu_seconds() - everybody
    steps = len(answer["tokens"][0])
    return Sample(
        arrangement=engine.side.name,
        round=number,
        batch=batch,
        step_ms=round(1000 * answer["seconds"] / steps, 3),
        cpu_ms=round(1000 * own / steps, 3),
        other_busy_cores=max(0.0, everybody - own) / answer["seconds"],
    )
