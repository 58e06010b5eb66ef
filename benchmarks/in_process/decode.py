"""Decode and prefill against vLLM's CPU backend, alternating in one run.

``python -m benchmarks decode --model 160m --batch 1 8 --save``; see benchmarks/README.md.
Invariant: every figure of a report comes from one run of this command.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.engines.engine_process import (
    OURS,
    EngineProcess,
    Side,
    vllm_cpu,
    vllm_cpu_all_cores,
)
from benchmarks.in_process.decode_report import ModelResult, Run, Sample, markdown
from benchmarks.models.shapes import SHAPES, Checkpoint, find_checkpoint
from benchmarks.runner.command import Command, begin, positive, rotated, say, started
from benchmarks.runner.machine import busy_cpu_seconds, read_bandwidth

MAX_MODEL_LEN = 512
KV_CACHE_BYTES = 1 << 30
WARM_UP_TOKENS = 8
# Timings of the first output token per round; it is short, hence noisy.
PREFILL_REPEATS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("decode", _parser(), _measure, markdown).main(argv)


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
        "--peers",
        choices=["default", "all-cores", "both"],
        default="both",
        help="vLLM's CPU backend as it comes, with a thread on every core, or each (default: both)",
    )
    return parser


def _measure(args: argparse.Namespace, command: str) -> Run:
    _check_lengths(args)
    sides = [OURS]
    if args.peers != "all-cores":
        sides.append(vllm_cpu())
    if args.peers != "default":
        sides.append(vllm_cpu_all_cores())
    begun = begin(command)
    models = []
    for name in args.model:
        say(f"checkpoint {name}")
        models.append(measure_model(find_checkpoint(name), sides, args))
    return Run(
        **begun,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        rounds=args.rounds,
        sides={side.name: {"note": side.note, "env": dict(side.env)} for side in sides},
        models=models,
    )


def _check_lengths(args: argparse.Namespace) -> None:
    if args.output_tokens < 2:
        raise ValueError("--output-tokens must be at least 2: the first token is prefill")
    if args.prompt_tokens + args.output_tokens > MAX_MODEL_LEN:
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens} + --output-tokens {args.output_tokens} "
            f"must not exceed the engines' max_model_len of {MAX_MODEL_LEN}"
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
) -> ModelResult:
    """Measure every side over `checkpoint`; the first side is ours."""
    engine_args = _engine_args(checkpoint, args)
    samples: list[Sample] = []
    bandwidths: list[float] = []
    with started(EngineProcess(side, engine_args) for side in sides) as engines:
        for round_number in range(1, args.rounds + 1):
            bandwidths.append(read_bandwidth(checkpoint.step_weight_bytes))
            for batch in args.batch:
                for engine in rotated(engines, round_number):
                    sample = _sample(engine, checkpoint, round_number, batch, args)
                    samples.append(sample)
                    say(
                        f"  round {round_number} batch {batch} {engine.side.name}: "
                        f"{sample.step_ms:.3f} ms/step"
                    )
    return ModelResult(
        name=checkpoint.name,
        path=str(checkpoint.path),
        parameters=checkpoint.parameters,
        step_weight_bytes=checkpoint.step_weight_bytes,
        engine_args=engine_args,
        engines={engine.side.name: engine.description for engine in engines},
        read_bandwidths=bandwidths,
        samples=samples,
    )


def _sample(
    engine: EngineProcess,
    checkpoint: Checkpoint,
    round_number: int,
    batch: int,
    args: argparse.Namespace,
) -> Sample:
    # Every side gets the same prompts; no two rounds do.
    chooser = random.Random(f"{round_number} {batch}")
    prompts = [
        [chooser.randrange(3, checkpoint.vocab_size) for _ in range(args.prompt_tokens)]
        for _ in range(batch)
    ]
    with engine.awake():
        # Caches and pages of an engine that slept are cold, unlike those of a busy one.
        engine.generate(prompts, WARM_UP_TOKENS)
        wall, own, all_processes = time.perf_counter(), engine.cpu_seconds(), busy_cpu_seconds()
        prefills = [engine.generate(prompts, 1)[0] for _ in range(PREFILL_REPEATS)]
        seconds, tokens = engine.generate(prompts, args.output_tokens)
        wall = time.perf_counter() - wall
        own = engine.cpu_seconds() - own
        all_processes = busy_cpu_seconds() - all_processes
    return Sample(
        round=round_number,
        side=engine.side.name,
        batch=batch,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        prefill_seconds=prefills,
        total_seconds=seconds,
        busy_cores=own / wall,
        other_busy_cores=max(0.0, all_processes - own) / wall,
        first_tokens=[row[0] for row in tokens],
    )
