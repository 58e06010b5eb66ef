"""Cost of metrics: decode steps and HTTP loads with and without them, and single calls.

``python -m benchmarks metrics_cost --model 15m --batch 1 8 --http --save``. An engine in this
process and a server's streams alternate between a few steps with recorders and a few without
(metrics/unmetered.py). See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.in_process.step_profile import DecodeLoad, start_engine
from benchmarks.metrics.calls import time_calls
from benchmarks.metrics.http import compare_loads
from benchmarks.metrics.report import Pairs, Run, markdown
from benchmarks.metrics.unmetered import Switch, install
from benchmarks.models.shapes import Checkpoint, find_checkpoint
from benchmarks.runner.command import Command, add_model_and_batch, begin, positive, say
from benchmarks.runner.machine import busy_cpu_seconds

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

_BUCKETS = tuple(range(1, 33))
_PROMPT_TOKENS = 32
# Few, because the machine drifts within 0.1 s; several, because a step depends on the caches that
# the previous one left; odd, because a step's time depends on the context's length modulo 16.
_STEPS_A_TURN = 7


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("metrics_cost", _parser(), _measure, markdown).main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks metrics_cost", description=__doc__)
    add_model_and_batch(parser, "15m")
    parser.add_argument("--steps", type=positive, default=400, help="per sample (default: 400)")
    parser.add_argument("--rounds", type=positive, default=40, help="pairs (default: 40)")
    parser.add_argument("--http", action="store_true", help="a server as well")
    parser.add_argument("--http-rounds", type=positive, default=40, help="pairs (default: 40)")
    return parser


def _measure(args: argparse.Namespace, command: str) -> Run:
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    with tempfile.TemporaryDirectory(prefix="rbln-metrics-") as folder:
        calls = time_calls(Path(folder) / "calls", _BUCKETS)
        steps = _compare_steps(checkpoint, args, Path(folder) / "engine")
        loads = []
        if args.http:
            loads = compare_loads(checkpoint, args.batch, args.http_rounds, Path(folder) / "http")
    return Run(
        **begun,
        model=checkpoint.name,
        calls=calls,
        steps=steps,
        loads=loads,
    )


def _compare_steps(checkpoint: Checkpoint, args: argparse.Namespace, run_dir: Path) -> list[Pairs]:
    say(f"starting an engine for {checkpoint.name}")
    core = start_engine(checkpoint, max(args.batch), run_dir)
    switch = Switch(run_dir / "switch")
    undo = install(switch)
    try:
        return [_compare_batch(core, checkpoint, batch, switch, args) for batch in args.batch]
    finally:
        undo()
        core.shutdown()


def _compare_batch(
    core: EngineCore, checkpoint: Checkpoint, batch: int, switch: Switch, args: argparse.Namespace
) -> Pairs:
    load = DecodeLoad(core, checkpoint, batch, _PROMPT_TOKENS, 0.0)
    _sample(core, load, switch, args.steps)
    wall, own, all_busy = time.perf_counter(), time.process_time(), busy_cpu_seconds()
    pairs = [_sample(core, load, switch, args.steps) for _ in range(args.rounds)]
    wall = time.perf_counter() - wall
    other = busy_cpu_seconds() - all_busy - (time.process_time() - own)
    result = Pairs(f"batch {batch}", "µs a step", pairs, max(0.0, other) / wall)
    say(f"  {result.label}: {result.cost:+.2%}")
    return result


def _sample(core: EngineCore, load: DecodeLoad, switch: Switch, steps: int) -> tuple[float, float]:
    """Return the median microseconds of `steps` steps with metrics and of as many without."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number, _ in enumerate(load.decode_steps(2 * steps)):
        silent = number // _STEPS_A_TURN % 2
        switch.turn(metered=not silent)
        started = time.perf_counter()
        core.step()
        taken[silent].append(time.perf_counter() - started)
    return statistics.median(taken[0]) * 1e6, statistics.median(taken[1]) * 1e6
