"""Runs scenarios: ``python -m benchmarks scenarios [NAME ...] --minutes 90 --save``.

Every scenario alternates its sides, repeats disturbed samples and writes one result file. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.engines.server_process import ServerError
from benchmarks.runner.command import FigureRun, begin, markdown, positive, save, say, to_json
from benchmarks.scenarios import local, serving
from benchmarks.scenarios.bench import Bench, OutOfTimeError, first_line


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario, its first line in reports, and its minutes on an idle 2-core machine."""

    run: Callable[[Bench], None]
    about: str
    minutes: int
    models: tuple[str, ...]
    sides: tuple[str, ...]


SCENARIOS = {
    "fair_prefill": Scenario(
        serving.run_fair_prefill,
        "First tokens of short prompts behind one of 7,000 tokens, and of that prompt itself",
        minutes=14,
        models=("160m",),
        sides=("ours", "ours-fcfs", "vllm-cpu-all-cores", "vllm-cpu"),
    ),
    "kernels": Scenario(
        local.run_kernels,
        "Attention of the last chunk of a prompt of 7,000 tokens, of the machine's limit",
        minutes=1,
        models=("160m",),
        sides=("ours",),
    ),
    "sampling": Scenario(
        serving.run_sampling,
        "Output rate of greedy and of every other kind of sampling, 1 and 8 requests at once",
        minutes=45,
        models=("160m", "1.2b"),
        sides=("ours", "vllm-cpu-all-cores", "vllm-cpu"),
    ),
    "concurrency": Scenario(
        serving.run_concurrency,
        "First tokens by prompt length, and output rates with 1 to 64 requests at once",
        minutes=18,
        models=("160m",),
        sides=("ours", "vllm-cpu-all-cores", "vllm-cpu"),
    ),
    "shapes": Scenario(
        serving.run_shapes,
        "First tokens and output rates of other dtypes, head sizes and widths than the usual ones",
        minutes=25,
        # With a dtype other than bfloat16 after a colon.
        models=(
            "160m:float16",
            "160m:float32",
            *"160m-heads-80 160m-heads-128 160m-heads-256".split(),
        ),
        sides=("ours", "vllm-cpu-all-cores"),
    ),
    "engine_process": Scenario(
        local.run_engine_process,
        "Time of a decode step in the engine process outside its graph, by `step_profile`",
        minutes=6,
        models=("160m",),
        sides=("ours",),
    ),
    "starts": Scenario(
        local.run_starts,
        "Starts of a server of ours to its first answer, from nothing, from caches and from "
        "the disk",
        minutes=20,
        models=("build/default-model", "160m", "1.2b"),
        sides=tuple(local.KINDS),
    ),
    "memory": Scenario(
        serving.run_memory,
        "Memory and output rate of ours with 8 to 256 streams, and memory during ten minutes "
        "of load",
        minutes=30,
        models=("15m", "160m"),
        sides=("ours",),
    ),
    "kv_tiers": Scenario(
        serving.run_kv_tiers,
        "First tokens of prompts that are computed, in the prefix cache, and in files after a "
        "restart",
        minutes=5,
        models=("160m",),
        sides=("ours",),
    ),
    "prefill_decode": Scenario(
        serving.run_prefill_decode,
        "First tokens of prompts that one server reads and another answers, against one server",
        minutes=4,
        models=("160m",),
        sides=("ours",),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    # A stopped server cannot notice its parent's exit, so SIGTERM has to unwind the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline = time.monotonic() + 60 * args.minutes
    command = shlex.join(["python", "-m", "benchmarks", "scenarios", *words])
    for name in args.names or SCENARIOS:
        run = _run(name, args, command, deadline)
        report = markdown(run)
        print(report)
        if args.save and run.figures:
            save(name, run.started, run.machine, report, to_json(run))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scenarios", description=__doc__)
    minutes = ", ".join(f"{name} {one.minutes}" for name, one in SCENARIOS.items())
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        choices=[*SCENARIOS, []],
        help=f"with about so many minutes: {minutes} (default: all, in this order)",
    )
    parser.add_argument("--model", nargs="+", help="instead of the scenario's models")
    parser.add_argument("--side", nargs="+", help="instead of the scenario's sides")
    parser.add_argument("--rounds", type=positive, default=3, help="default: 3")
    parser.add_argument(
        "--minutes", type=float, default=180.0, help="time bound of the command (default: 180)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the command")
    parser.add_argument(
        "--save", action="store_true", help="write reports and figures to benchmarks/results/"
    )
    return parser


def _run(name: str, args: argparse.Namespace, command: str, deadline: float) -> FigureRun:
    scenario, begun = SCENARIOS[name], begin(command)
    say(f"{name}: about {scenario.minutes} minutes on an idle 2-core machine")
    with tempfile.TemporaryDirectory(prefix="rbln-bench-") as folder:
        bench = Bench(
            models=args.model or scenario.models,
            sides=[side for side in args.side or scenario.sides if _is_offered(side)],
            rounds=args.rounds,
            quick=args.quick,
            deadline=deadline,
            folder=Path(folder),
        )
        try:
            scenario.run(bench)
        except OutOfTimeError:
            bench.notes.append("**Incomplete**: the time bound of the command ended the run.")
        except (ServerError, OSError, ValueError, subprocess.SubprocessError) as error:
            bench.notes.append(f"**Ended early**: {first_line(error)}")
            say(f"{name}: {error}")
    return FigureRun(
        **begun,
        about=scenario.about,
        sides=bench.described,
        figures=list(bench.figures.values()),
        notes=bench.notes,
    )


@cache
def _is_offered(side: str) -> bool:
    """False for ours with a `--prefill-policy` that this server lacks."""
    if not side.startswith("ours-"):
        return True
    command = [sys.executable, "-m", "server", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "--prefill-policy" in done.stdout
