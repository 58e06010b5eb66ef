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
from benchmarks.runner.command import RESULTS, begin, say
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


def header_of(command: str, sides: Mapping[str, str]) -> Header:
    """Return the header of a run that begins now; ``sides`` describes each side."""
    begun = begin(command)
    begun["machine"] = asdict(begun["machine"])
    return Header(**begun, peer_versions=peer_versions(), sides=dict(sides))


def stem_of(log: Log, name: str) -> str:
    """Return the stem of the saved files of a run."""
    header = log.of(Header)[0]
    return f"{header.started[:10]}-{Machine(**header.machine).slug}-{name}"


def save_logged(log: Log, name: str, report: str) -> None:
    """Write a report and its raw numbers under benchmarks/results/."""
    stem = stem_of(log, name)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{stem}.jsonl").write_bytes(log.path.read_bytes())
    (RESULTS / f"{stem}.md").write_text(report, encoding="utf-8")
    say(f"written: {RESULTS / stem}.md and .jsonl")
