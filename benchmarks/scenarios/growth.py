"""Cost as work grows: steps, first tokens, adapters, queues, stored objects and metrics.

The curves and their expected exponents are in runner/curves.py; docs/cost_curves.md shows the
newest saved run.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.engines.server_process import ServerProcess
from benchmarks.runner.curves import CURVES
from benchmarks.scenarios.bench import (
    Bench,
    Sample,
    Values,
    checkpoint_folder,
    firsts,
    prompts,
    send,
)
from benchmarks.scenarios.growth_in_process import METERED

MODELS = ("160m",)
SIDES = ("ours",)
MINUTES = 30
_SMALL_MODEL = "15m"
_LENGTH, _OUTPUT_TOKENS, _ADAPTED = 8192, 32, 64
_QUICK_SIZES = 2
CONTEXT, BATCH, PROMPT, ADAPTERS, WAITING = (curve.name for curve in CURVES[:5])
_SIZES = {curve.name: curve.sizes for curve in CURVES}


def run(bench: Bench) -> None:
    """Fill the figures."""
    for curve, prepare in METERED.items():
        for size in _sizes(bench, curve):
            bench.check_time()
            with prepare(bench.folder, size) as take:
                for number in range(bench.rounds):
                    bench.take("in process", "ours", number, take, size)
    for number in range(bench.rounds):
        for size in _sizes(bench, WAITING):
            bench.take(_SMALL_MODEL, "ours", number, partial(_waiting, size), size)
    _adapters(bench)
    for model in bench.models:
        _steps(bench, model)


def _sizes(bench: Bench, curve: str) -> tuple[int, ...]:
    return _SIZES[curve][:_QUICK_SIZES] if bench.quick else _SIZES[curve]


def _steps(bench: Bench, model: str) -> None:
    sizes, batches = _sizes(bench, CONTEXT), _sizes(bench, BATCH)
    length = 1024 if bench.quick else _LENGTH
    with bench.serving(model, length, "--max-num-seqs", str(max(batches))) as servers:
        for number, server in bench.each_round(servers):
            for size in sizes:
                bench.measure(model, number, server, partial(_context, server, size), size)
            for size in batches:
                bench.measure(model, number, server, partial(_batch, server, size), size)


def _context(server: ServerProcess, size: int, seed: str) -> Values:
    bodies = [server.body(t, _OUTPUT_TOKENS) for t in prompts(f"context {seed}", 1, size)]
    outcomes = send(server, bodies)[1]
    return {
        PROMPT: (firsts(outcomes)[0], "s"),
        CONTEXT: (1000 * (outcomes[0].itl or 0.0), "ms"),
    }


def _batch(server: ServerProcess, size: int, seed: str) -> Values:
    texts = prompts(f"batch {seed} {size}", size, 32)
    outcomes = send(server, [server.body(text, 4 * _OUTPUT_TOKENS) for text in texts])[1]
    # Requests that began last decode in a full batch all the time.
    steps = sorted(outcome.itl for outcome in outcomes if outcome.itl)
    return {BATCH: (1000 * steps[0], "ms")}


def _adapters(bench: Bench) -> None:
    """Decode 64 requests at once, which share 1 to 64 adapters."""
    from tests.adapters import make_adapter

    checkpoint, count = checkpoint_folder(_SMALL_MODEL), max(_sizes(bench, ADAPTERS))
    folders = [
        make_adapter(checkpoint, bench.folder / f"adapter-{i}", seed=i) for i in range(count)
    ]
    flags = ("--enable-lora", "--max-loras", str(count), "--max-lora-rank", "8", "--lora-modules")
    named = [f"a{i}={folder}" for i, folder in enumerate(folders)]
    seqs = ("--max-num-seqs", str(_ADAPTED))
    with bench.serving(_SMALL_MODEL, 1024, *seqs, *flags, *named) as servers:
        for number, server in bench.each_round(servers):
            for size in _sizes(bench, ADAPTERS):
                take = partial(_adapted, server, size)
                bench.measure(_SMALL_MODEL, number, server, take, size)


def _adapted(server: ServerProcess, size: int, seed: str) -> Values:
    texts = prompts(f"adapters {seed} {size}", _ADAPTED, 16)
    bodies = [server.body(text, 2 * _OUTPUT_TOKENS) for text in texts]
    bodies = [body | {"model": f"a{place % size}"} for place, body in enumerate(bodies)]
    outcomes = send(server, bodies)[1]
    return {ADAPTERS: (1000 * min(outcome.itl for outcome in outcomes if outcome.itl), "ms")}


def _waiting(size: int, _attempt: int) -> Sample:
    """Run `waiting` in a process of its own, which holds an engine."""
    words = ["--model", _SMALL_MODEL, "--waiting", str(size)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.in_process.waiting", *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    microseconds, others = map(float, done.stdout.split())
    return Sample({WAITING: (microseconds, "µs")}, others)
