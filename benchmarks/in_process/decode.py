"""Decode and prefill against vLLM's CPU backend, alternating in one run.

``python -m benchmarks decode --model 160m --batch 1 8 --save``; see benchmarks/README.md.
Invariant: every figure of a report comes from one run of this command.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engines.engine_process import EngineProcess, Side
from benchmarks.engines.sides import VLLM_NAMES, step_side
from benchmarks.models.shapes import SHAPES, Checkpoint, find_checkpoint
from benchmarks.runner.command import (
    OURS,
    SHARE,
    Command,
    Figure,
    FigureRun,
    begin,
    markdown,
    positive,
    rotated,
    say,
    started,
    to_json,
)
from benchmarks.runner.machine import busy_cpu_seconds, read_bandwidth
from benchmarks.scenarios.bench import Bench, Sample, Values

MAX_MODEL_LEN = 512
KV_CACHE_BYTES = 1 << 30
WARM_UP_TOKENS = 8
# Timings of the first output token per round; it is short, hence noisy.
PREFILL_REPEATS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("decode", _parser(), _measure, markdown, to_json).main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks decode", description=__doc__)
    parser.add_argument(
        "--model",
        nargs="+",
        default=["15m", "160m"],
        metavar="SIZE|PATH",
        help=f"sizes to build ({', '.join(SHAPES)}) or checkpoint folders (default: 15m 160m)",
    )
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 8], help="default: 1 8")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="default: 32")
    parser.add_argument("--output-tokens", type=positive, default=128, help="default: 128")
    parser.add_argument(
        "--side", nargs="+", choices=VLLM_NAMES, default=VLLM_NAMES, help="beside ours"
    )
    return parser


def _measure(args: argparse.Namespace, command: str) -> FigureRun:
    check_lengths(args)
    sides = [step_side(name).side for name in (OURS, *args.side)]
    begun = begin(command)
    figures: list[Figure] = []
    for name in args.model:
        say(f"checkpoint {name}")
        figures += measure_model(find_checkpoint(name), sides, args)
    return FigureRun(
        **begun,
        about="Decode",
        sides={side.name: side.note for side in sides},
        figures=figures,
        notes=[method(args)],
    )


def check_lengths(args: argparse.Namespace) -> None:
    """Raise ValueError for lengths that no engine of this command can have."""
    if args.output_tokens < 2:
        raise ValueError("--output-tokens must be at least 2: the first token is prefill")
    if args.prompt_tokens + args.output_tokens > MAX_MODEL_LEN:
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens} + --output-tokens {args.output_tokens} "
            f"must not exceed the engines' max_model_len of {MAX_MODEL_LEN}"
        )


def method(args: argparse.Namespace) -> str:
    """Return the report's paragraph on the lengths and the figures."""
    return (
        f"Prompts of {args.prompt_tokens} random tokens, {args.output_tokens} greedy output "
        "tokens, bfloat16. Prefill is a call for one output token; decode is the time of the "
        "whole call minus that. *Of the bandwidth* is the time to read the weights at the round's "
        "bandwidth, over the step."
    )


def _engine_args(checkpoint: Checkpoint, args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine arguments of all sides; the rest is each side's default."""
    return {
        "model": str(checkpoint.path),
        "dtype": "bfloat16",
        "max_model_len": min(MAX_MODEL_LEN, checkpoint.max_position_embeddings),
        "max_num_seqs": max(args.batch),
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        # A repeated prompt must cost its prefill again.
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }


def measure_model(
    checkpoint: Checkpoint, sides: Sequence[Side], args: argparse.Namespace
) -> list[Figure]:
    """Measure every side over `checkpoint`, round by round."""
    names = [side.name for side in sides]
    bench = Bench(models=[checkpoint.name], sides=names, rounds=args.rounds, folder=Path())
    engine_args = _engine_args(checkpoint, args)
    with started(EngineProcess(side, engine_args) for side in sides) as engines:
        for number in range(args.rounds):
            least = checkpoint.step_weight_bytes / read_bandwidth(checkpoint.step_weight_bytes)
            for batch in args.batch:
                for engine in rotated(engines, number):
                    take = partial(_sample, engine, checkpoint.vocab_size, batch, args, least)
                    bench.take(checkpoint.name, engine.side.name, number, take)
    return list(bench.figures.values())


def _sample(
    engine: EngineProcess,
    vocab_size: int,
    batch: int,
    args: argparse.Namespace,
    least_seconds: float,
    _attempt: int,
) -> Sample:
    tokens = range(args.prompt_tokens)
    prompts = [[random.randrange(3, vocab_size) for _ in tokens] for _ in range(batch)]
    with engine.awake():
        # Caches and pages of an engine that slept are cold, unlike those of a busy one.
        engine.generate(prompts, WARM_UP_TOKENS)
        wall, own, busy = time.perf_counter(), engine.cpu_seconds(), busy_cpu_seconds()
        prefills = [engine.generate(prompts, 1)[0] for _ in range(PREFILL_REPEATS)]
        seconds, _ = engine.generate(prompts, args.output_tokens)
        wall = time.perf_counter() - wall
        others = busy_cpu_seconds() - busy - (engine.cpu_seconds() - own)
    prefill = statistics.median(prefills)
    step = (seconds - prefill) / (args.output_tokens - 1)
    name = f"decode step, batch {batch}"
    values: Values = {
        name: (1000 * step, "ms"),
        f"{name}, of the bandwidth": (least_seconds / step, SHARE),
        f"prefill, batch {batch}": (batch * args.prompt_tokens / prefill, "tokens/s"),
    }
    return Sample(values, max(0.0, others) / wall)
