"""`rbln-serve tune`: which buckets would have run what was served fastest.

It reads the records that servers leave in the cache root, needs no model and no device, and
changes nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from rbln_backend.bucketing.advice import LIMITS, advise
from rbln_backend.bucketing.usage import UsageFile

USAGE_FOLDER = Path("rbln") / "usage"


def tune(
    cache_root: Path,
    model: str | None = None,
    limits: dict[str, int] | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Print advice for each record whose model's name contains `model`.

    `limits` are the most graphs by phase. Returns 0, or 1 when nothing fitting is recorded.
    """
    reports = [
        report
        for path in sorted((cache_root / USAGE_FOLDER).glob("*.json"))
        if (report := _report(path, {**LIMITS, **(limits or {})})) is not None
        and (model is None or model in report["model"])
    ]
    if as_json:
        sys.stdout.write(json.dumps(reports, indent=2) + "\n")
    elif not reports:
        which = "" if model is None else f" of a model like {model!r}"
        sys.stderr.write(f"rbln-serve tune: no record{which} below {cache_root / USAGE_FOLDER}\n")
    else:
        for report in reports:
            _print(report, sys.stdout)
    return 0 if reports else 1


def _report(path: Path, limits: dict[str, int]) -> dict[str, Any] | None:
    try:
        usage = UsageFile(path).read()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"rbln-serve tune: {path} is left out: {error}\n")
        return None
    about = {"model": usage.about.get("model", ""), "device": usage.about.get("device", "")}
    return {**about, "file": str(path), "advice": advise(usage, limits)}


def _print(report: dict[str, Any], out: TextIO) -> None:
    out.write(f"{report['model']} on {report['device']}\n")
    for phase, advice in report["advice"].items():
        if advice is None:
            out.write(f"  {phase}: nothing recorded\n")
            continue
        out.write(
            f"  {phase}: {advice['steps']} steps, now {advice['current']}, "
            f"{advice['padding_now']:.1%} padding\n"
        )
        if advice["suggested"] == advice["current"]:
            out.write("    these are the best\n")
            continue
        out.write(
            f"    better {advice['suggested']}: {advice['padding_then']:.1%} padding, "
            f"{advice['saving']:.1%} less step time predicted\n    {advice['setting']}\n"
        )
