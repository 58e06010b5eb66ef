"""Gaps between tokens of two streams, with and without a storm of large bodies beside them.

``python -m benchmarks storm --model 160m --save``. Rounds with and without a storm alternate; all
clients share the machine with the server. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients.client_process import ClientProcess
from benchmarks.engines.server_process import ServerProcess, Serving
from benchmarks.engines.sides import server_side
from benchmarks.models.shapes import find_checkpoint
from benchmarks.models.text_checkpoint import prompt_text, text_checkpoint
from benchmarks.runner.command import Command, RunHeader, begin, heading, positive, say

TARGET = 2.0
"""Maximum ratio of the p99 gap with a storm to that without."""
_STREAMS = 2
_PROMPT_TOKENS = 32
_MAX_MODEL_LEN = 1024
_KV_CACHE_BYTES = 1 << 28
_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
_BUDGET_S = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Milliseconds between tokens of one round, its seconds, and the storm's counts."""

    p50: float
    p99: float
    seconds: float
    storm: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command."""

    model: str
    quiet: list[Sample]
    stormy: list[Sample]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks storm", description=__doc__)
    parser.add_argument("--model", default="160m", help="as of models/shapes.py (default: 160m)")
    parser.add_argument("--rounds", type=positive, default=5, help="pairs (default: 5)")
    parser.add_argument("--tokens", type=positive, default=400, help="of a stream (default: 400)")
    parser.add_argument("--clients", type=positive, default=4, help="of the storm (default: 4)")
    return Command("storm", parser, _measure, markdown).main(argv)


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    quiet, stormy = [], []
    with tempfile.TemporaryDirectory(prefix="rbln-storm-") as folder:
        server = _server(text_checkpoint(checkpoint.path), Path(folder))
        with server, server.awake():
            _sample(server, args, "warm", clients=1)
            for turn in range(args.rounds):
                quiet.append(_sample(server, args, f"quiet {turn}", clients=0))
                stormy.append(_sample(server, args, f"storm {turn}", clients=args.clients))
    return Run(
        **begun,
        model=checkpoint.name,
        quiet=quiet,
        stormy=stormy,
    )


def _server(text_model: Path, folder: Path) -> ServerProcess:
    template = folder / "template.jinja"
    template.write_text(_TEMPLATE, encoding="utf-8")
    flags = ("--chat-template", str(template), "--max-queued-tokens", "16384")
    side = server_side("ours").with_flags(*flags)
    serving = Serving.of(text_model, _MAX_MODEL_LEN, _KV_CACHE_BYTES)
    say("starting a server")
    return ServerProcess(side, serving, folder / "server.log")


def _sample(server: ServerProcess, args: argparse.Namespace, seed: str, clients: int) -> Sample:
    chooser = random.Random(seed)
    port, model = server.serving.port, str(server.serving.text_model)
    load = {
        "port": port,
        "bodies": [
            server.body(prompt_text(chooser, _PROMPT_TOKENS), args.tokens) for _ in range(_STREAMS)
        ],
        "concurrency": _STREAMS,
        "budget_seconds": _BUDGET_S,
    }
    storm = {"port": port, "model": model, "clients": clients, "budget_seconds": _BUDGET_S}
    storming = ClientProcess("benchmarks.clients.storm_load", storm) if clients else None
    outcome = ClientProcess("benchmarks.clients.load", load).end()
    result = {} if storming is None else storming.end()
    if not outcome["gaps"]:
        raise server.error("streamed nothing")
    large = result.get("requests", 0)
    say(f"  {seed}: p99 {outcome['gaps'][2] * 1e3:.2f} ms, {large} large bodies")
    return Sample(outcome["gaps"][0] * 1e3, outcome["gaps"][2] * 1e3, outcome["seconds"], result)


def markdown(run: Run) -> str:
    """Return the report."""
    ratio = statistics.median(b.p99 / a.p99 for a, b in zip(run.quiet, run.stormy, strict=True))
    met = "met" if ratio <= TARGET else "missed"
    lines = [
        *heading("Streams beside a storm of large bodies", run),
        f"- Model {run.model}, {_STREAMS} streams. Target: the p99 gap at most {TARGET:g} times "
        f"that without a storm; **{met}** (median of the rounds {ratio:.2f}).",
        "",
        "| round | quiet p50, ms | p99 | storm p50, ms | p99 | p99 ratio | bodies/s | MB/s |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(*row) for row in enumerate(zip(run.quiet, run.stormy, strict=True), 1)),
        "",
        f"Answers of the storm by status: {_statuses(run)}.",
    ]
    return "\n".join(lines) + "\n"


def _row(number: int, pair: tuple[Sample, Sample]) -> str:
    quiet, storm = pair
    rate, size = (storm.storm[name] / storm.seconds for name in ("requests", "bytes"))
    return (
        f"| {number} | {quiet.p50:.2f} | {quiet.p99:.2f} | {storm.p50:.2f} | {storm.p99:.2f} | "
        f"{storm.p99 / quiet.p99:.2f} | {rate:.1f} | {size / 1e6:.1f} |"
    )


def _statuses(run: Run) -> str:
    counts: Counter[str] = Counter()
    for sample in run.stormy:
        counts.update(sample.storm["statuses"])
    return ", ".join(f"{count} of {status}" for status, count in sorted(counts.items()))
