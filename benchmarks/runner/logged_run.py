"""Runs that write every record at once, so that an interrupted run has a report, too."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from benchmarks.engines.peers import peer_versions
from benchmarks.models.shapes import CACHE_ROOT
from benchmarks.runner.command import Figure, FigureRun, begin, save, say, to_json
from benchmarks.runner.machine import Machine
from benchmarks.runner.records import Header, Log


def measure_logged(
    name: str,
    words: Sequence[str],
    measure: Callable[[Log, str], None],
    report: Callable[[Log], None],
    *,
    suffix: str = "",
) -> None:
    """Run ``measure`` on a new log and then ``report`` it, even if ``measure`` raises.

    ``measure`` takes the command line as well: ``name`` with its arguments ``words``.
    """
    # A stopped engine cannot notice its parent's exit, so SIGTERM has to unwind the stack.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    runs = CACHE_ROOT / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    log = Log(runs / f"{datetime.now(UTC).astimezone():%Y-%m-%dT%H%M%S}{suffix}.jsonl")
    say(f"raw numbers: {log.path}")
    try:
        measure(log, shlex.join(["python", "-m", "benchmarks", name, *words]))
    finally:
        # An interrupted run is reported, too.
        if log.records:
            report(log)


def get_header(command: str, sides: Mapping[str, str]) -> Header:
    """Return the header of a run that begins now; ``sides`` describes each side."""
    begun = begin(command)
    begun["machine"] = asdict(begun["machine"])
    return Header(**begun, peer_versions=peer_versions(), sides=dict(sides))


def save_logged(log: Log, name: str, report: str, figures: list[Figure]) -> None:
    """Write a report and the figures of a run under benchmarks/results/."""
    header = log.of(Header)[0]
    run = FigureRun(
        started=header.started,
        command=header.command,
        machine=Machine(**header.machine),
        load_before=header.load_before,
        about=name,
        sides=header.sides,
        figures=figures,
        notes=[],
    )
    save(name, run.started, run.machine, report, to_json(run))
