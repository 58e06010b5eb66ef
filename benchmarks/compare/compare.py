"""Comparison of this project with its alternatives, all sides alternating in one run.

``python -m benchmarks compare --save`` measures the machine's limits, decode steps and prefill in
process, then starts, load over HTTP and memory, for every model, and writes one report. See
benchmarks/README.md. Invariant: every figure of a report comes from one run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare.http import COLD, PART, HttpComparison
from benchmarks.compare.plans import plan_for
from benchmarks.compare.report import figures, markdown
from benchmarks.compare.steps import PART as STEPS
from benchmarks.compare.steps import Subject, log_model, measure_steps
from benchmarks.engines.peers import gguf_of, peers_python
from benchmarks.engines.sides import SIDE_NAMES, before, server_side, step_side
from benchmarks.models.shapes import CACHE_ROOT, SHAPES, find_checkpoint
from benchmarks.models.text_checkpoint import text_checkpoint
from benchmarks.runner.command import say
from benchmarks.runner.logged_run import get_header, measure_logged, save_logged
from benchmarks.runner.machine import ModelWork
from benchmarks.runner.records import Failure, Log

PARTS = (STEPS, COLD, PART)
DEFAULT_STEP_SIDES = ("ours", "vllm-cpu-all-cores", "llama.cpp", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(words)
    if args.report is not None:
        _report(Log.read(args.report), args)
        return 0
    try:
        measure_logged(
            "compare",
            words,
            lambda log, command: _measure(log, args, command),
            lambda log: _report(log, args),
        )
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument(
        "--model",
        nargs="+",
        default=["15m", "160m", "1.2b"],
        metavar="SIZE",
        help=f"of {', '.join(SHAPES)}, Llamas alone (default: 15m 160m 1.2b)",
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--side",
        nargs="+",
        choices=SIDE_NAMES,
        default=SIDE_NAMES,
        help="over HTTP, beside ours",
    )
    parser.add_argument(
        "--step-side", nargs="+", choices=SIDE_NAMES, default=DEFAULT_STEP_SIDES, help="in process"
    )
    parser.add_argument(
        "--before", type=Path, metavar="FOLDER", help="a side of its own: an earlier checkout of us"
    )
    parser.add_argument("--quick", action="store_true", help="one round and small time budgets")
    parser.add_argument(
        "--save", action="store_true", help="write report and figures to benchmarks/results/"
    )
    parser.add_argument(
        "--report", type=Path, metavar="JSONL", help="measure nothing; report an earlier run"
    )
    return parser


def _measure(log: Log, args: argparse.Namespace, command: str) -> None:
    steps = ("ours", *args.step_side) if STEPS in args.part else ()
    servers = ("ours", *args.side) if {COLD, PART} & {*args.part} else ()
    stepped = {name: step_side(name) for name in dict.fromkeys(steps)}
    served = {name: server_side(name) for name in dict.fromkeys(servers)}
    if args.before is not None:
        step, server = before(args.before.resolve())
        stepped |= {"before": step} if steps else {}
        served |= {"before": server} if servers else {}
    needs_llama = "llama.cpp" in stepped | served
    if needs_llama:
        say("peers' environment")
        try:
            peers_python()
        except subprocess.CalledProcessError as error:
            # The other sides do not need it.
            log.add(Failure(model="", part="peers", side="llama.cpp", text=str(error)))
    log.add(
        get_header(
            command,
            {f"{name}, in process": step.side.note for name, step in stepped.items()}
            | {f"{name}, over HTTP": server.note for name, server in served.items()},
        )
    )
    subjects = [_subject(name, quick=args.quick, needs_llama=needs_llama) for name in args.model]
    minutes = sum(subject.plan.minutes.get(part, 0.0) for subject in subjects for part in args.part)
    say(f"about {minutes:.0f} minutes on an idle 2-core machine without bfloat16 instructions")
    for subject in subjects:
        with tempfile.TemporaryDirectory(prefix="run-", dir=CACHE_ROOT) as folder:
            log_model(log, subject, subject.text_model)
            began = time.monotonic()
            if STEPS in args.part:
                say(f"{subject.name}: steps in process")
                measure_steps(log, subject, list(stepped.values()), Path(folder))
            sides, cold = list(served.values()), COLD in args.part
            comparison = HttpComparison(log, subject, sides, Path(folder), own_caches=cold)
            if COLD in args.part:
                say(f"{subject.name}: cold starts")
                comparison.cold_starts()
            if PART in args.part:
                say(f"{subject.name}: load over HTTP")
                comparison.load()
                comparison.warm_starts(subject.plan.warm_starts - 1)
            say(f"{subject.name} took {(time.monotonic() - began) / 60:.1f} minutes")


def _subject(name: str, *, quick: bool, needs_llama: bool) -> Subject:
    say(f"checkpoint {name}")
    checkpoint = find_checkpoint(name)
    text_model = text_checkpoint(checkpoint.path)
    plan = plan_for(checkpoint.parameters)
    # llama.cpp reports a missing file as its failure.
    gguf = text_model / "missing.gguf"
    if needs_llama:
        try:
            gguf = gguf_of(text_model)
        except (OSError, subprocess.CalledProcessError) as error:
            say(f"no GGUF of {name}: {error}")
    return Subject(
        checkpoint=checkpoint,
        text_model=text_model,
        gguf=gguf,
        work=ModelWork.of(text_model),
        plan=plan.quick() if quick else plan,
    )


def _report(log: Log, args: argparse.Namespace) -> None:
    report = markdown(log)
    print(report)
    if args.save:
        save_logged(log, "compare", report, figures(log))
