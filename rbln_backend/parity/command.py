"""`rbln-parity`: runs, prints and writes the report; the status is the verdict."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rbln_backend.errors import ConfigError
from rbln_backend.parity.options import parse

OUT_OF_LIMITS = 1
WRONG_ARGUMENTS = 2
SIDE_FAILED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 within the limits, 1 outside, 2 for wrong arguments, 3 if a side could not run."""
    options = parse(arguments)
    # After the flags, so that a misspelt one is reported at once.
    from rbln_backend.host.processes import ChildError
    from rbln_backend.parity.report import json_lines, text_report
    from rbln_backend.parity.run import run_parity

    try:
        outcome = run_parity(options, _log)
    except ConfigError as error:
        sys.stderr.write(f"rbln-parity: {error}\n")
        return WRONG_ARGUMENTS
    except ChildError as error:
        sys.stderr.write(f"rbln-parity: {error}\n")
        return SIDE_FAILED
    sys.stdout.write("\n" + text_report(outcome))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json_lines(outcome), encoding="utf-8")
    return 0 if outcome.passed else OUT_OF_LIMITS


def _log(line: str) -> None:
    # Flush: a side runs for minutes after its line.
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
