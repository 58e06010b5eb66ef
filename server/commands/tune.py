"""The command line of `rbln-serve tune`.

Exit codes: 0 done, 1 nothing to tune for or an engine failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rbln_backend.errors import RblnError
from server.commands.command_line.command_parser import CommandParser
from server.commands.command_line.server_flags import check_vllm_flags
from server.tuning.batchsize_log import read_log
from server.tuning.output import FORMATS
from server.tuning.plot import to_svg
from server.tuning.search import LIMITS
from server.tuning.sources import Work, present_tables, recorded_work, work_of
from server.tuning.study import study
from server.tuning.trace import read_trace

if TYPE_CHECKING:
    from server.commands.tune_measuring import Measuring

_PROG = "rbln-serve tune"
_ABOUT = """\
Find the buckets with the least step time for served traffic: from the records that servers leave
in the cache root, from Prometheus, from vLLM's log of batch sizes, or from a trace.

With --measure MODEL and the flags of `serve`, step times are measured on a separate engine. The
saving is then measured as well, alternating between current and suggested buckets.
"""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def tune(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = tune_parser()
    args, rest = parser.parse_known_args(argv)
    if args.measure is None:
        parser.reject(rest)
    check_vllm_flags(parser, rest, parser.flags())
    try:
        works = _works(args)
        measuring = args.measure and _measuring((args.measure, *rest), args.timeout)
        if measuring and len(works) > 1:
            names = ", ".join(work.name for work in works)
            raise ValueError(f"measuring takes one record, there are {names}; name it by --model")
    except (OSError, ValueError, RblnError) as error:
        parser.error(str(error))
    if not works:
        which = "" if args.model is None else f" of a model like {args.model!r}"
        sys.stderr.write(f"{_PROG}: nothing is recorded{which}\n")
        return 1
    try:
        make = measuring.study if measuring else study
        studies = [make(work, _limits(args, work)) for work in works]
    except RblnError as error:
        sys.stderr.write(f"{_PROG}: error: {error}\n")
        return 1
    sys.stdout.write(FORMATS[args.format](studies))
    if args.plot is not None:
        args.plot.write_text(to_svg(studies), encoding="utf-8")
    return 0


def _measuring(argv: Sequence[str], timeout_s: float) -> Measuring:
    # Not before the flags are checked, nor for recorded traffic: it loads half of the server.
    from server.commands.tune_measuring import Measuring

    return Measuring(argv, timeout_s)


def _works(args: argparse.Namespace) -> list[Work]:
    if args.prometheus is not None:
        from server.tuning.prometheus_range import read_range

        end = time.time() if args.until is None else args.until.timestamp()
        span = end - args.since, end, args.resolution
        name = f"{args.prometheus} {args.selector}".strip()
        return work_of(name, read_range(args.prometheus, args.selector, *span))
    if args.trace is None and args.batchsize_log is None:
        return recorded_work(args.cache_root, args.model)
    name = str(args.trace or args.batchsize_log)
    sizes = (args.max_num_seqs, args.max_num_batched_tokens)
    tables = present_tables(args.decode_buckets, args.prefill_buckets, *sizes)
    if args.trace is not None:
        return [Work(name=name, tables=tables, requests=read_trace(args.trace))]
    return [Work(name=name, tables=tables, usage=read_log(args.batchsize_log, tables))]


def _limits(args: argparse.Namespace, work: Work) -> dict[str, int]:
    """Return the given limits of graphs, else the current number or the default, if larger."""
    given = {"decode": args.decode_graphs, "prefill": args.prefill_graphs}
    return {phase: given[phase] or max(len(work.tables[phase]), LIMITS[phase]) for phase in given}


def tune_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = CommandParser(
        prog=_PROG,
        usage=f"{_PROG} [options] [--measure MODEL [options of serve]]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("what was served (default: the records of the cache root)")
    add, one = group.add_argument, group.add_mutually_exclusive_group().add_argument
    add("--cache-root", type=Path, metavar="DIR", help="[VLLM_CACHE_ROOT]")
    add("--model", metavar="TEXT", help="only records whose name contains TEXT")
    one("--trace", type=Path, metavar="FILE", help="JSON lines or CSV of requests")
    log = "log with VLLM_LOG_BATCHSIZE_INTERVAL"
    one("--batchsize-log", type=Path, metavar="FILE", help=log)
    one("--prometheus", metavar="URL", help="a Prometheus that scrapes the servers")
    add("--since", type=_duration, default=86400.0, metavar="24h", help="how far back (24h)")
    add("--until", type=datetime.fromisoformat, metavar="TIME", help="ISO 8601 (now)")
    add("--resolution", type=_duration, default=15.0, metavar="15s", help="of samples (15s)")
    add("--selector", default="", metavar="LABELS", help="""such as 'job="x"'""")
    add = parser.add_argument_group("buckets").add_argument
    present = "of a log or trace, the present ones (the default ones)"
    for phase, limit in LIMITS.items():
        most = f"most graphs for {phase} steps (as many as now, {limit} at least)"
        add(f"--{phase}-graphs", type=_positive, metavar="N", help=most)
        add(f"--{phase}-buckets", type=_sizes, metavar="N,N", help=present)
    add("--max-num-seqs", type=_positive, metavar="N", help="of a log or trace")
    add("--max-num-batched-tokens", type=_positive, metavar="N", help="of a log or trace")
    add = parser.add_argument_group("measuring and output").add_argument
    add("--measure", metavar="MODEL", help="measure on MODEL; flags of serve follow")
    add("--timeout", type=float, default=3600.0, metavar="S", help="an engine may take (3600)")
    add("--format", choices=sorted(FORMATS), default="text")
    add("--plot", type=Path, metavar="FILE.svg", help="draw sizes and buckets")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {number}")
    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _duration(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a duration such as 15s, 30m or 24h, got {text}")
    return float(found[1]) * _SECONDS[found[2]]
