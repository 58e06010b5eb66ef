"""Write deploy/grafana/dashboards/*.json: `python -m deploy.grafana.generate [--check]`.

`--check` changes nothing and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.grafana.buckets import BUCKETS
from deploy.grafana.devices import DEVICES
from deploy.grafana.features import FEATURES
from deploy.grafana.kv import KV
from deploy.grafana.overview import OVERVIEW
from deploy.grafana.startup import STARTUP

FOLDER = Path(__file__).resolve().parent / "dashboards"
DASHBOARDS = (OVERVIEW, STARTUP, BUCKETS, KV, FEATURES, DEVICES)


def files() -> dict[Path, str]:
    """Return each generated file and its text."""
    return {
        FOLDER / f"{dashboard.uid}.json": json.dumps(dashboard.json(), indent=2, sort_keys=True)
        + "\n"
        for dashboard in DASHBOARDS
    }


def stale() -> list[Path]:
    """Return the files that are missing, out of date, or of no dashboard."""
    wanted = files()
    wrong = [path for path, text in wanted.items() if not _has(path, text)]
    return wrong + [path for path in sorted(FOLDER.glob("*.json")) if path not in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the files; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="fail if a file is stale")
    check = parser.parse_args(arguments).check
    wanted, changed = files(), stale()
    for path in changed:
        if not check and path in wanted:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        elif not check:
            path.unlink()
        state = "stale, run `make dashboards`" if check else "written"
        sys.stdout.write(f"{path.name}: {state if path in wanted else 'of no dashboard'}\n")
    return 1 if check and changed else 0


def _has(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
