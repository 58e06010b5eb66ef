"""Schemas of JSONSchemaBench: coverage, compile times and masks beside other libraries.

    python -m benchmarks schemas FILE [--side NAME ...] [--first N] [--texts N] [--save]

FILE has a schema with its instances in each line. All sides run one after the other, each in a
process of its own with one core. `--texts` generates texts of our grammars and validates them with
jsonschema and jsonschema_rs (100000 for a whole run).
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runner.command import Command, RunHeader, begin, heading, positive, say
from benchmarks.schemas.judging import SideResult, cases_of, judgements
from benchmarks.schemas.sides import SIDES
from benchmarks.schemas.soundness import Soundness, soundness_of

_SHOWN = 20
_QUOTED = re.compile(r"['\"](\$?[A-Za-z]+)['\"]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaRun(RunHeader):
    """One run: the number of schemas, and results by side and by rule."""

    schemas: int
    sides: dict[str, SideResult]
    soundness: list[Soundness]


def measure(args: argparse.Namespace, command: str) -> SchemaRun:
    """Judge all schemas by every side, and generate texts of ours."""
    head = begin(command)
    cases = cases_of(args.file, args.first)
    sides: dict[str, SideResult] = {}
    for side in args.side or SIDES:
        say(f"{side}: {len(cases)} schemas")
        sides[side] = SideResult.of(list(judgements(side, cases)))
    found: list[Soundness] = []
    if args.texts:
        say(f"texts: {args.texts} for each rule")
        # Each rule in a process of its own.
        jobs = [(cases, closed, args.texts) for closed in (True, False)]
        with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
            found = pool.starmap(soundness_of, jobs)
    return SchemaRun(**head, schemas=len(cases), sides=sides, soundness=found)


def markdown(run: SchemaRun) -> str:
    """Return the report."""
    lines = [
        *heading("JSON schemas", run),
        "",
        f"{run.schemas} schemas. *Passing*: compiled, and all instances judged as they should be. "
        "Times are processor times; compile times those of compiled schemas, and ours contain the "
        "checks and the normalising.",
        "",
        "| side | passing | refused | valid instance refused | invalid instance accepted "
        "| compile p50 / p99, ms | mask mean / worst |",
        "|---|---|---|---|---|---|---|",
        *(_row(side, found, run.schemas) for side, found in run.sides.items()),
    ]
    for side, found in run.sides.items():
        reasons = Counter(
            _keyword(item.refused) for item in found.others if item.refused is not None
        )
        if reasons:
            listed = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
            lines += ["", f"{side} refuses: {listed}."]
        wrong = [item.name for item in found.others if item.invalid_accepted]
        if wrong:
            lines += ["", f"{side} accepts an invalid instance of: {', '.join(wrong[:_SHOWN])}."]
    for one in run.soundness:
        lines += [
            "",
            f"With `{'omit' if one.closed else 'allow'}`, {len(one.faults)} of {one.texts} "
            f"generated texts are invalid for jsonschema or jsonschema_rs ({one.cut} texts were "
            f"cut, {one.refused} schemas are refused).",
            "",
            *(f"- {name}: `{text[:120]}`: {why}" for name, text, why in one.faults[:_SHOWN]),
        ]
    return "\n".join(lines) + "\n"


def _row(side: str, found: SideResult, total: int) -> str:
    cells = [
        side,
        _share(found.passing, total),
        _share(found.refused, total),
        _share(found.valid_refused, total),
        f"{found.invalid_accepted} schemas",
        f"{found.compile_p50_s * 1e3:.1f} / {found.compile_p99_s * 1e3:.1f}",
        f"{found.mean_mask_s * 1e6:.0f} µs / {found.worst_mask_s * 1e3:.1f} ms",
    ]
    return f"| {' | '.join(cells)} |"


def _keyword(reason: str) -> str:
    """Return the keyword that a reason names first, or the beginning of its first line."""
    found = _QUOTED.search(reason)
    return f"`{found[1]}`" if found else reason.splitlines()[0][:60]


def _share(count: int, total: int) -> str:
    return f"{count / max(1, total):.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks schemas", description=__doc__)
    parser.add_argument("file", type=Path, help="lines of JSON")
    parser.add_argument("--side", nargs="+", choices=SIDES, help="default: all")
    parser.add_argument("--first", type=positive, help="only the first N schemas")
    parser.add_argument("--texts", type=positive, help="generate N texts for each of our rules")
    return Command("schemas", parser, measure, markdown).main(argv)
