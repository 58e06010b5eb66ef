"""Runs scenarios: ``python -m benchmarks scenarios [NAME ...] --minutes 90 --save``.

Every scenario alternates its sides, repeats disturbed samples and writes one result file. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from benchmarks.engines.server_process import ServerError
from benchmarks.runner.command import begin, positive, save, say
from benchmarks.runner.figures import FigureRun, markdown, to_json
from benchmarks.scenarios.bench import Bench, OutOfTimeError, first_line

SCENARIOS = (
    *("fair_prefill", "kernels", "sampling", "concurrency", "shapes", "engine_process"),
    *("starts", "memory", "kv_tiers", "prefill_decode"),
)


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
    minutes = ", ".join(f"{name} {_module(name).MINUTES}" for name in SCENARIOS)
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
    module, begun = _module(name), begin(command)
    say(f"{name}: about {module.MINUTES} minutes on an idle 2-core machine")
    with tempfile.TemporaryDirectory(prefix="rbln-bench-") as folder:
        bench = Bench(
            models=args.model or module.MODELS,
            sides=[side for side in args.side or module.SIDES if _is_offered(side)],
            rounds=args.rounds,
            quick=args.quick,
            deadline=deadline,
            folder=Path(folder),
        )
        try:
            module.run(bench)
        except OutOfTimeError:
            bench.notes.append("**Incomplete**: the time bound of the command ended the run.")
        except (ServerError, OSError, ValueError, subprocess.SubprocessError) as error:
            bench.notes.append(f"**Ended early**: {first_line(error)}")
            say(f"{name}: {error}")
    about = str(module.__doc__).partition("\n")[0].removesuffix(".")
    return FigureRun(
        **begun,
        about=about,
        sides=bench.described,
        figures=list(bench.figures.values()),
        notes=bench.notes,
    )


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.scenarios.{name}")


@cache
def _is_offered(side: str) -> bool:
    """False for ours with a `--prefill-policy` that this server lacks."""
    if not side.startswith("ours-"):
        return True
    command = [sys.executable, "-m", "server", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "--prefill-policy" in done.stdout
