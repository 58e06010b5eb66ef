"""Report for programs: one JSON object a line, whose `kind` says what it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rbln_backend.parity.run import Outcome


def json_lines(outcome: Outcome) -> str:
    """Return the lines: run, sides, answers, prompts of each pair, pairs, layers, verdict."""
    return "".join(json.dumps(_finite(line), default=str) + "\n" for line in _lines(outcome))


def _lines(outcome: Outcome) -> Iterator[dict[str, Any]]:
    yield {"kind": "run", "options": asdict(outcome.options), "clamped": outcome.clamped}
    for side, result in outcome.results.items():
        yield {"kind": "side", "side": side, "about": result.about, "seconds": result.seconds}
        for index, answer in enumerate(result.answers):
            yield {
                "kind": "answer",
                "side": side,
                "prompt": index,
                "text": answer.text,
                "token_ids": answer.token_ids.tolist(),
                "ranking": answer.ranking(outcome.options.topk),
            }
    for pair in outcome.pairs:
        sides = {"base": pair.base, "other": pair.other}
        for index, delta in enumerate(pair.deltas):
            yield {"kind": "prompt", **sides, "prompt": index, **asdict(delta)}
        yield {"kind": "pair", **sides, **asdict(pair.summary)}
    if (found := outcome.bisection) is not None:
        for layer in found.layers:
            yield {"kind": "layer", "reference": found.reference, **asdict(layer)}
    departure = outcome.departure
    yield {
        "kind": "verdict",
        "passed": outcome.passed,
        "failures": [asdict(failure) for failure in outcome.failures],
        "departure": None if departure is None else asdict(departure),
    }


def _finite(value: Any) -> Any:
    """Return the value with null for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
