"""`rbln-parity`: runs, prints, writes the reports, and says by its status whether all is well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rbln_backend.errors import ConfigError
from rbln_backend.parity.options import Options, parse
from rbln_backend.parity.report.html import html_report
from rbln_backend.parity.report.json_report import json_report
from rbln_backend.parity.report.junit import junit_report
from rbln_backend.parity.report.text import text_report
from rbln_backend.parity.run import Outcome, run_parity
from rbln_backend.reporting.child_process import ChildError

OUT_OF_LIMITS = 1
WRONG_ARGUMENTS = 2
SIDE_FAILED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 within the limits, 1 outside, 2 for wrong arguments, 3 if a side could not run."""
    options = parse(arguments)
    try:
        outcome = run_parity(options)
    except ConfigError as error:
        sys.stderr.write(f"rbln-parity: {error}\n")
        return WRONG_ARGUMENTS
    except ChildError as error:
        sys.stderr.write(f"rbln-parity: {error}\n")
        return SIDE_FAILED
    sys.stdout.write(text_report(outcome))
    for path, make in _reports(options):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(outcome), encoding="utf-8")
    return 0 if outcome.passed else OUT_OF_LIMITS


def _reports(options: Options) -> list[tuple[Path, Callable[[Outcome], str]]]:
    makers = (
        (options.json, json_report),
        (options.junit, junit_report),
        (options.html, html_report),
    )
    return [(path, make) for path, make in makers if path is not None]


if __name__ == "__main__":
    sys.exit(main())
