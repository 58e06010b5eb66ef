"""The report for programs. Numbers that JSON cannot hold become null."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rbln_backend.parity.report.summary import summarize
from rbln_backend.parity.run import Outcome, Pair


def json_report(outcome: Outcome) -> str:
    """Return one object: verdict, sides, pairs with every position, failures, layers."""
    options = asdict(outcome.options)
    value = {
        "passed": outcome.passed,
        "options": {
            name: str(item) if isinstance(item, Path) else item for name, item in options.items()
        },
        "sides": {
            side: {
                "about": result.about,
                "seconds": result.seconds,
                "texts": [answer.text for answer in result.answers],
                "token_ids": [answer.token_ids.tolist() for answer in result.answers],
            }
            for side, result in outcome.results.items()
        },
        "pairs": [_pair(pair) for pair in outcome.pairs],
        "failures": [asdict(failure) for failure in outcome.failures],
        "bisection": None if outcome.bisection is None else asdict(outcome.bisection),
    }
    return json.dumps(_finite(value), indent=1) + "\n"


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "base": pair.base,
        "other": pair.other,
        "summary": asdict(summarize(pair.deltas)),
        "prompts": [asdict(delta) for delta in pair.deltas],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
