"""Tokens/s that clients receive with 1, 2 and 4 HTTP processes before data-parallel engines.

``python -m benchmarks http_processes --save``: one server for each number of processes, with small
engines, so that the HTTP side is a large part of the work. Clients stream completions in a closed
loop. Invariant: every figure of a report comes from one run of this command, and the numbers of
processes alternate within it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.server_process import ServerProcess, Serving
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import SHAPES, find_checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import Command, RunHeader, begin, heading, positive, say
from benchmarks.scenarios.bench import send

_MAX_MODEL_LEN = 512
_KV_CACHE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command; `rates` has tokens/s by number of HTTP processes."""

    model: str
    engines: int
    streams: int
    output_tokens: int
    rates: dict[str, list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks http_processes", description=__doc__
    )
    parser.add_argument("--model", default="15m", help="as of models/shapes.py (default: 15m)")
    parser.add_argument("--processes", type=positive, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engines", type=positive, default=2, help="data-parallel size (2)")
    parser.add_argument("--rounds", type=positive, default=3, help="of all numbers (3)")
    parser.add_argument("--streams", type=positive, default=64, help="at once (64)")
    parser.add_argument("--output-tokens", type=positive, default=128, help="of each (128)")
    return Command("http_processes", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    path = text_checkpoint(checkpoint.path) if args.model in SHAPES else checkpoint.path
    rates: dict[str, list[float]] = {str(number): [] for number in args.processes}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbln-http-")))
        servers: dict[str, ServerProcess] = {}
        for number in rates:
            side = server_side("ours").with_flags(
                *("--data-parallel-size", str(args.engines), "--api-server-count", number),
                *("--max-num-seqs", str(max(1, args.streams // args.engines))),
            )
            serving = Serving.of(path, _MAX_MODEL_LEN, _KV_CACHE_BYTES)
            log = folder / f"server-{number}.log"
            servers[number] = stack.enter_context(ServerProcess(side, serving, log))
            say(f"{number} HTTP processes are ready")
        chooser = random.Random(0)
        for round_number in range(args.rounds + 1):
            for number, server in servers.items():
                rate = _rate(server, args, chooser)
                # The first round warms up.
                if round_number:
                    rates[number].append(rate)
            say(f"round {round_number} of {args.rounds}")
    return Run(
        **begun,
        model=checkpoint.name,
        engines=args.engines,
        streams=args.streams,
        output_tokens=args.output_tokens,
        rates=rates,
    )


def _rate(server: ServerProcess, args: argparse.Namespace, chooser: random.Random) -> float:
    """Return the tokens/s of one round of two requests for each stream."""
    bodies: list[dict[str, Any]] = [
        {**server.body(prompt_text(chooser, 16), args.output_tokens), "ignore_eos": True}
        for _ in range(2 * args.streams)
    ]
    with server.awake():
        seconds, outcomes = send(server, bodies, concurrency=args.streams)
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise server.error(f"failed {len(failed)} streams: {failed[0]}")
    return sum(outcome.tokens for outcome in outcomes) / seconds


def markdown(run: Run) -> str:
    """Return the report."""
    first = statistics.median(next(iter(run.rates.values())))
    lines = [
        *heading("HTTP processes before data-parallel engines", run),
        f"- Model {run.model}, in bfloat16, {run.engines} data-parallel engines, {run.streams} "
        f"streams of {run.output_tokens} tokens at once. The clients share the machine.",
        "- Medians of tokens/s, with the lowest and the highest.",
        "",
        "| HTTP processes | rounds | tokens/s | lowest | highest | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for number, rates in run.rates.items():
        middle = statistics.median(rates)
        lines.append(
            f"| {number} | {len(rates)} | {middle:.0f} | {min(rates):.0f} | {max(rates):.0f} | "
            f"{middle / first:.2f} |"
        )
    return "\n".join(lines) + "\n"
