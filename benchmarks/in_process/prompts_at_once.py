"""Time to first token of several short prompts at once, all sides alternating.

``python -m benchmarks prompts_at_once --model moe 15m smollm2 --rounds 5 --save``. Ours with its
defaults, ours with one prompt per prefill step, and vLLM's CPU backend on every core. No prefix is
hit. Invariant: every figure of a report comes from one run of this command.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engines.engine_process import OURS, EngineProcess, Side, vllm_cpu_all_cores
from benchmarks.models.experts_model import moe_checkpoint
from benchmarks.models.gguf_checkpoint import expanded, gguf_file
from benchmarks.models.shapes import CACHE_ROOT, Checkpoint, find_checkpoint
from benchmarks.runner.command import (
    Command,
    RunHeader,
    begin,
    disturbance,
    machine_lines,
    positive,
    rotated,
    say,
    spread,
    started,
)
from benchmarks.runner.machine import busy_cpu_seconds
from rbln_backend.checkpoints.catalogue import CATALOGUE
from rbln_backend.checkpoints.folders import checkpoint_of

ONE = Side(
    name="ours-one",
    platform=OURS.platform,
    env={**OURS.env, "VLLM_RBLN_PREFILL_PROMPTS": "1"},
    note="the same with one prompt in each prefill step (`prefill_prompts` 1)",
)
LENGTHS = ("16", "32", "64", "32-128")
_SEQUENCES = 8
_BUDGET_S = 120.0
_LOWEST_TOKEN = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds until each prompt of one call had its first token."""

    model: str
    round: int
    side: str
    lengths: str
    seconds: list[float]
    first_tokens: list[int]
    other_busy_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """All samples of one command."""

    prompts: int
    sides: dict[str, str]
    samples: list[Sample]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("prompts_at_once", _parser(), _measure, _markdown).main(argv)


def _parser() -> argparse.ArgumentParser:
    name = "python -m benchmarks prompts_at_once"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument(
        "--model",
        nargs="+",
        default=["moe", "15m"],
        metavar="NAME|PATH",
        help=f"moe, {', '.join(CATALOGUE)} (in bfloat16), a size of models/shapes.py or a "
        "checkpoint folder (default: moe 15m)",
    )
    parser.add_argument("--prompts", type=positive, default=8, help="default: 8")
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, help="tokens, or FROM-TO")
    parser.add_argument("--rounds", type=positive, default=5, help="default: 5")
    parser.add_argument("--ours-alone", action="store_true", help="leave vLLM's CPU backend out")
    return parser


def _measure(args: argparse.Namespace, command: str) -> Run:
    sides = [OURS, ONE] if args.ours_alone else [OURS, ONE, vllm_cpu_all_cores()]
    begun, samples = begin(command), []
    for name in args.model:
        checkpoint = _find(name)
        say(checkpoint.name)
        samples += _measure_model(checkpoint, sides, args)
    return Run(
        **begun,
        prompts=args.prompts,
        sides={side.name: side.note for side in sides},
        samples=samples,
    )


def _find(name: str) -> Checkpoint:
    if name == "moe":
        return moe_checkpoint()
    if name in CATALOGUE:
        name = str(expanded(checkpoint_of(str(gguf_file(name)), CACHE_ROOT)))
    return find_checkpoint(name)


def _measure_model(
    checkpoint: Checkpoint, sides: Sequence[Side], args: argparse.Namespace
) -> list[Sample]:
    engine_args = {
        "model": str(checkpoint.path),
        "dtype": "bfloat16",
        "max_model_len": min(512, checkpoint.max_position_embeddings),
        # Runs with one prompt use the graphs of several.
        "max_num_seqs": max(_SEQUENCES, args.prompts),
        "kv_cache_memory_bytes": 1 << 29,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    samples = []
    with started(EngineProcess(side, engine_args) for side in sides) as engines:
        for round_number in range(args.rounds):
            for lengths in args.lengths:
                for engine in rotated(engines, round_number):
                    prompts = _prompts(checkpoint, lengths, round_number, args.prompts)
                    place = (checkpoint.name, round_number, lengths)
                    samples.append(_sample(engine, place, prompts))
    return samples


def _prompts(checkpoint: Checkpoint, lengths: str, number: int, count: int) -> list[list[int]]:
    """Return a round's prompts, equal for all sides and different in every round."""
    chooser = random.Random(f"{number} {lengths}")
    shortest, _, longest = lengths.partition("-")
    sizes = [chooser.randint(int(shortest), int(longest or shortest)) for _ in range(count)]
    tokens = range(_LOWEST_TOKEN, checkpoint.vocab_size)
    return [chooser.choices(tokens, k=size) for size in sizes]


def _sample(engine: EngineProcess, place: tuple[str, int, str], prompts: list[list[int]]) -> Sample:
    model, number, lengths = place
    with engine.awake():
        # Caches and pages of an engine that slept are cold, unlike those of a busy one.
        engine.ask_within([prompt[::-1] for prompt in prompts], 1, _BUDGET_S)
        wall, own, all_busy = time.perf_counter(), engine.cpu_seconds(), busy_cpu_seconds()
        answer = engine.ask_within(prompts, 1, _BUDGET_S)
        wall = time.perf_counter() - wall
        other = busy_cpu_seconds() - all_busy - (engine.cpu_seconds() - own)
    sample = Sample(
        model=model,
        round=number,
        side=engine.side.name,
        lengths=lengths,
        seconds=answer["first_token_seconds"],
        first_tokens=[row[0] for row in answer["tokens"]],
        other_busy_cores=max(0.0, other) / wall,
    )
    say(f"  round {number} {lengths} {sample.side}: {1000 * max(sample.seconds):.1f} ms")
    return sample


def _markdown(run: Run) -> str:
    lines = [
        f"# Prompts at once: {run.prompts}",
        "",
        f"`{run.command}`, {run.started}.",
        "",
        *machine_lines(run.machine, run.load_before),
        *(f"- `{name}`: {note}." for name, note in run.sides.items()),
        f"- {disturbance([sample.other_busy_cores for sample in run.samples])}",
        "",
        "Milliseconds until all have their first tokens, and on average until one has; medians of "
        "the rounds. Ratios are of one round's times, with their range: above 1 `ours` is faster.",
        "",
        "| model | tokens | side | all | mean | all / ours | mean / ours | first tokens as ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cases = dict.fromkeys((sample.model, sample.lengths) for sample in run.samples)
    lines += [_line(run, *case, side) for case in cases for side in run.sides]
    return "\n".join([*lines, ""])


def _line(run: Run, model: str, lengths: str, side: str) -> str:
    by_side = {
        name: [s for s in run.samples if (s.model, s.lengths, s.side) == (model, lengths, name)]
        for name in (side, OURS.name)
    }
    theirs, ours = by_side[side], by_side[OURS.name]
    pairs = list(zip(theirs, ours, strict=True))
    alike = sum(
        a == b
        for one, other in pairs
        for a, b in zip(one.first_tokens, other.first_tokens, strict=True)
    )
    cells = [
        *(model, lengths, side),
        f"{1000 * statistics.median(max(s.seconds) for s in theirs):.1f}",
        f"{1000 * statistics.median(statistics.mean(s.seconds) for s in theirs):.1f}",
        spread([max(one.seconds) / max(other.seconds) for one, other in pairs]),
        spread(
            [statistics.mean(one.seconds) / statistics.mean(other.seconds) for one, other in pairs]
        ),
        f"{alike} of {len(pairs) * run.prompts}",
    ]
    return f"| {' | '.join(cells)} |"
