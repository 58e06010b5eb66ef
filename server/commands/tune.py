"""`rbln-serve tune`: the bucket sizes with the least step time for recorded traffic.

Exit codes: 0 done, 1 nothing is recorded, 2 invalid command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rbln_backend.api.names import resolve
from rbln_backend.buckets import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    BucketTable,
    decode_bucket_table,
    prefill_chunk_table,
)
from rbln_backend.errors import RblnError
from rbln_backend.usage import (
    LEAST_STEPS,
    LIMITS,
    PHASES,
    Change,
    PhaseUsage,
    StepTimes,
    Usage,
    UsageFile,
    fitting,
    read_log,
    suggest,
)
from server.commands.flags import CommandParser

_PROG = "rbln-serve tune"
_ABOUT = """\
Print the buckets with the least step time for served traffic: from the records that servers leave
in the cache root, or from a log of batch sizes.
"""
_FOLDER = Path("rbln") / "usage"
_UNITS = {"decode": "rows", "prefill": "tokens"}


@dataclass(frozen=True, slots=True)
class _Record:
    """Recorded steps, and the buckets that they ran in."""

    name: str
    usage: Usage
    tables: Mapping[str, BucketTable]
    """Current buckets by phase."""


@dataclass(frozen=True, slots=True)
class _Advice:
    """Current and suggested buckets of one record, by phase."""

    name: str
    changes: Mapping[str, Change]
    timed: bool
    """True if step times were recorded; otherwise a step counts as many seconds as it has rows."""

    @property
    def saving(self) -> float:
        """Predicted share of the step time of both phases that is saved, 0 to 1."""
        changes = self.changes.values()
        return 1.0 - sum(c.then.seconds for c in changes) / sum(c.now.seconds for c in changes)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that set the suggested buckets."""
        sizes = {p: ",".join(map(str, change.suggested)) for p, change in self.changes.items()}
        return {
            "VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY": "manual",
            "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS": sizes["decode"],
            "VLLM_RBLN_PREFILL_CHUNK_BUCKETS": sizes["prefill"],
        }

    def lines(self) -> Iterator[str]:
        yield self.name
        for phase, change in self.changes.items():
            if not change.now.steps:
                yield f"  {phase}: nothing ran"
                continue
            now, then = list(change.current), list(change.suggested)
            padded = f"{change.now.padding:.1%} of the {_UNITS[phase]} are padding"
            yield f"  {phase}: {change.now.steps} steps, now {now}, {padded}"
            better = f"better {then}, {change.then.padding:.1%} padding"
            yield "    these are the best" if now == then else f"    {better}"
        source = "recorded step times" if self.timed else "rows and tokens, as no times were logged"
        yield f"  {self.saving:.1%} less step time predicted, from {source}"
        yield "  to set it:"
        yield from (f"    {name}={value}" for name, value in self.environment.items())

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **{phase: change.report() for phase, change in self.changes.items()},
            "saving": round(self.saving, 4),
            "environment": self.environment,
        }


def tune(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = _parser()
    args = parser.parse_all(argv)
    try:
        records = _records(args)
        advice = [_advice(args, record) for record in records]
    except (OSError, ValueError, RblnError) as error:
        parser.error(str(error))
    if not advice:
        which = "" if args.model is None else f" of a model like {args.model!r}"
        sys.stderr.write(f"{_PROG}: nothing is recorded{which}\n")
        return 1
    if args.json:
        sys.stdout.write(json.dumps([one.report() for one in advice], indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for one in advice for line in one.lines())
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_PROG, description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument_group("what was served (default: the records)").add_argument
    add("--cache-root", type=Path, metavar="DIR", help="root of the records [VLLM_CACHE_ROOT]")
    add("--model", metavar="TEXT", help="only records whose name contains TEXT")
    log = "log of a server with VLLM_LOG_BATCHSIZE_INTERVAL, instead of the records"
    add("--batchsize-log", type=Path, metavar="FILE", help=log)
    add = parser.add_argument_group("current buckets of a log (default: a server's)").add_argument
    for phase in LIMITS:
        add(f"--{phase}-buckets", type=_sizes, metavar="N,N", help=f"sizes of {phase} graphs")
    add("--max-num-seqs", type=_positive, metavar="N", help="largest decode bucket")
    add("--max-num-batched-tokens", type=_positive, metavar="N", help="largest prefill bucket")
    add = parser.add_argument_group("result").add_argument
    for phase, limit in LIMITS.items():
        most = f"most graphs for {phase} steps (as many as now, {limit} at least)"
        add(f"--{phase}-graphs", type=_positive, metavar="N", help=most)
    add("--json", action="store_true", help="print a JSON array")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _records(args: argparse.Namespace) -> list[_Record]:
    if args.batchsize_log is None:
        return _read_records(args.cache_root, args.model)
    # Raises `BucketError` and `ConfigError` for invalid sizes.
    decode, prefill = args.decode_buckets, args.prefill_buckets
    options: dict[str, Any] = {"prefill_chunk_buckets": list(prefill) if prefill else None}
    if decode:
        options["decode_batch_bucket_strategy"] = "manual"
        options["decode_batch_bucket_manual_buckets"] = list(decode)
    config = resolve({"rbln": options}, {}).config
    rows = args.max_num_seqs or max(decode or (DEFAULT_MAX_NUM_SEQS,))
    chunk = args.max_num_batched_tokens or max(prefill or (DEFAULT_CHUNK_TOKENS,))
    tables = {
        "prefill": prefill_chunk_table(config, chunk),
        "decode": decode_bucket_table(config, rows),
    }
    return [_Record(str(args.batchsize_log), read_log(args.batchsize_log, tables), tables)]


def _read_records(cache_root: Path | None, model: str | None) -> list[_Record]:
    """Return the records of servers in the cache root, latest first.

    An unreadable record is reported on standard error and skipped.
    """
    root = cache_root or Path(resolve(None).config.cache_root)
    records = []
    paths = (root / _FOLDER).glob("*.json")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            usage = UsageFile(path).read()
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{_PROG}: {path} is left out: {error}\n")
            continue
        about = usage.about
        # The digest tells configurations of one model apart: adapters, context and more.
        name = f"{about.get('model', '')} on {about.get('device', '')} ({path.stem[:8]})"
        sizes = {phase: about.get(f"{phase}_buckets") for phase in PHASES}
        if (model is not None and model not in name) or not all(sizes.values()):
            continue
        tables = {phase: BucketTable(tuple(table)) for phase, table in sizes.items() if table}
        for phase, ran in usage.phases.items():
            # Drop sizes that only an earlier engine allowed; its step times remain valid.
            ran.steps_by_size = fitting(ran.steps_by_size, tables[phase])
        if usage.steps:
            records.append(_Record(name, usage, tables))
    return records


def _advice(args: argparse.Namespace, record: _Record) -> _Advice:
    """Return the best buckets of at most as many graphs as given, else as now or the default."""
    limits = {"decode": args.decode_graphs, "prefill": args.prefill_graphs}
    changes = {}
    for phase, table in record.tables.items():
        # Nothing is known of a phase that did not run: its buckets stay.
        changes[phase] = Change(table, table, PhaseUsage(), PhaseUsage())
        ran = record.usage.phases[phase]
        if ran.steps:
            times = StepTimes(ran.mean_seconds(LEAST_STEPS))
            limit = limits[phase] or max(len(table), LIMITS[phase])
            changes[phase] = suggest(ran.steps_by_size, times, table, limit)
    timed = any(ran.seconds > 0 for ran in record.usage.phases.values())
    return _Advice(record.name, changes, timed)
