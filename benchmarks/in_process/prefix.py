"""Savings of the prefix cache: the same prompts with it and without, in one run.

``python -m benchmarks prefix --save``. Models with full attention, with sliding windows and with
both; see benchmarks/README.md. Invariant: every figure of a report comes from one run of this
command, and both engines get the same prompts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from benchmarks.engines.engine_process import OURS, EngineProcess, Side
from benchmarks.in_process.prefix_report import (
    ARRIVALS,
    OFF,
    ON,
    ModelResult,
    Run,
    Sample,
    markdown,
)
from benchmarks.models.shapes import SHAPES, Checkpoint, find_checkpoint
from benchmarks.runner.command import Command, begin, positive, rotated, say
from benchmarks.runner.machine import busy_cpu_seconds

BLOCK_SIZE = 128
CHUNK_TOKENS = 256
WARM_UP_TOKENS = 8
_COMPUTED = "rbln_prefill_useful_tokens_total"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("prefix", _parser(), _measure, markdown).main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks prefix", description=__doc__)
    parser.add_argument(
        "--model",
        nargs="+",
        default=["15m", "15m-hybrid", "15m-window"],
        metavar="NAME|PATH",
        help=f"models to build ({', '.join(SHAPES)}) or checkpoint folders "
        "(default: 15m 15m-hybrid 15m-window)",
    )
    parser.add_argument("--requests", type=positive, default=16, help="default: 16")
    parser.add_argument("--shared-tokens", type=positive, default=2000, help="default: 2000")
    parser.add_argument("--own-tokens", type=positive, default=100, help="default: 100")
    parser.add_argument("--output-tokens", type=positive, default=32, help="default: 32")
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    return parser


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    models = []
    for name in args.model:
        say(f"checkpoint {name}")
        models.append(_measure_model(find_checkpoint(name), args))
    return Run(
        **begun,
        requests=args.requests,
        shared_tokens=args.shared_tokens,
        own_tokens=args.own_tokens,
        output_tokens=args.output_tokens,
        rounds=args.rounds,
        models=models,
    )


def _engine_args(checkpoint: Checkpoint, args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of both engines; the rest is the backend's default."""
    wanted = args.shared_tokens + args.own_tokens + args.output_tokens
    max_model_len = -(-wanted // BLOCK_SIZE) * BLOCK_SIZE
    if max_model_len > checkpoint.max_position_embeddings:
        raise ValueError(
            f"--shared-tokens {args.shared_tokens} + --own-tokens {args.own_tokens} + "
            f"--output-tokens {args.output_tokens} must not exceed the "
            f"{checkpoint.max_position_embeddings} positions of {checkpoint.name}"
        )
    return {
        "model": str(checkpoint.path),
        "dtype": "bfloat16",
        "max_model_len": max_model_len,
        "max_num_seqs": args.requests,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "block_size": BLOCK_SIZE,
        "skip_tokenizer_init": True,
        "seed": 0,
        # First-token times need statistics.
        "disable_log_stats": False,
    }


def _measure_model(checkpoint: Checkpoint, args: argparse.Namespace) -> ModelResult:
    engine_args = _engine_args(checkpoint, args)
    samples: list[Sample] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbln-bench-")))
        engines: list[tuple[EngineProcess, Path]] = []
        for name in (ON, OFF):
            say(f"  starting with prefix caching {name}")
            run_dir = folder / name
            run_dir.mkdir()
            process = EngineProcess(
                Side(name=name, platform=OURS.platform, env=OURS.env, note=OURS.note),
                {
                    **engine_args,
                    "enable_prefix_caching": name == ON,
                    "additional_config": {"rbln": {"run_dir": str(run_dir)}},
                },
                folder / f"{name}.log",
            )
            engines.append((stack.enter_context(process), run_dir))
        for round_number in range(1, args.rounds + 1):
            for arrival in ARRIVALS:
                prompts = _prompts(checkpoint, f"{round_number} {arrival}", args)
                for engine, run_dir in rotated(engines, round_number):
                    sample = _sample(engine, run_dir, round_number, arrival, prompts, args)
                    samples.append(sample)
                    say(
                        f"  round {round_number} {arrival}, caching {engine.side.name}: "
                        f"{sample.prefill_tokens} tokens, TTFT {sample.median_ttft_ms:.1f} ms"
                    )
        described = {engine.side.name: engine.description for engine, _ in engines}
    return ModelResult(
        name=checkpoint.name,
        path=str(checkpoint.path),
        parameters=checkpoint.parameters,
        engine_args=engine_args,
        engines=described,
        samples=samples,
    )


def _prompts(checkpoint: Checkpoint, seed: str, args: argparse.Namespace) -> list[list[int]]:
    """Return prompts with a common prefix; no two rounds share tokens."""
    chooser = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chooser.randrange(3, checkpoint.vocab_size) for _ in range(count)]

    shared = tokens(args.shared_tokens)
    return [shared + tokens(args.own_tokens) for _ in range(args.requests)]


def _sample(
    engine: EngineProcess,
    run_dir: Path,
    round_number: int,
    arrival: str,
    prompts: list[list[int]],
    args: argparse.Namespace,
) -> Sample:
    with engine.awake():
        # Caches and pages of an engine that slept are cold, unlike those of a busy one. Backwards,
        # the prompt shares no prefix with what follows.
        engine.generate([prompts[0][::-1]], WARM_UP_TOKENS)
        computed = _computed_tokens(run_dir)
        wall, own, all_processes = time.perf_counter(), engine.cpu_seconds(), busy_cpu_seconds()
        if arrival == ARRIVALS[0]:
            answers = [engine.ask([prompt], args.output_tokens) for prompt in prompts]
        else:
            answers = [engine.ask(prompts, args.output_tokens)]
        wall = time.perf_counter() - wall
        own = engine.cpu_seconds() - own
        all_processes = busy_cpu_seconds() - all_processes
        computed = _computed_tokens(run_dir) - computed
    return Sample(
        round=round_number,
        caching=engine.side.name,
        arrival=arrival,
        prefill_tokens=computed,
        cached_tokens=[count for answer in answers for count in answer["cached_tokens"]],
        ttft_seconds=[value for answer in answers for value in answer["first_token_seconds"]],
        total_seconds=sum(answer["seconds"] for answer in answers),
        other_busy_cores=max(0.0, all_processes - own) / wall,
        tokens=[row for answer in answers for row in answer["tokens"]],
    )


def _computed_tokens(run_dir: Path) -> int:
    """Return the prompt tokens computed so far by the engine's prefill graphs."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(run_dir / "metrics"))  # type: ignore[no-untyped-call]
    samples = [s for family in registry.collect() for s in family.samples]
    return int(sum(s.value for s in samples if s.name == _COMPUTED))
