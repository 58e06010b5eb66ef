"""Reports for programs: JSON, and JUnit XML for CI systems."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from typing import Any

from rbln_backend.parity.run import Outcome


def json_report(outcome: Outcome) -> str:
    """Return one object: verdict, sides, pairs with every position, failures, layers."""
    value = {
        "passed": outcome.passed,
        "options": asdict(outcome.options),
        "clamped": outcome.clamped,
        "sides": {
            side: {
                "about": result.about,
                "seconds": result.seconds,
                "texts": [answer.text for answer in result.answers],
                "token_ids": [answer.token_ids.tolist() for answer in result.answers],
                "rankings": [answer.ranking(outcome.options.topk) for answer in result.answers],
            }
            for side, result in outcome.results.items()
        },
        "pairs": [
            {
                "base": pair.base,
                "other": pair.other,
                "summary": asdict(pair.summary),
                "prompts": [asdict(delta) for delta in pair.deltas],
            }
            for pair in outcome.pairs
        ],
        "failures": [asdict(failure) for failure in outcome.failures],
        "bisection": None if outcome.bisection is None else asdict(outcome.bisection),
    }
    return json.dumps(_finite(value), indent=1, default=str) + "\n"


def junit_report(outcome: Outcome) -> str:
    """Return one test case per prompt, and one for the layers."""
    cases = {
        f"prompt {index}: {prompt}": [str(f) for f in outcome.failures if f.prompt == index]
        for index, prompt in enumerate(outcome.options.prompts)
    }
    if outcome.bisection is not None:
        cases["layers"] = [str(outcome.departure)] if outcome.departure else []
    suite = ElementTree.Element(
        "testsuite",
        name="rbln-parity",
        tests=str(len(cases)),
        failures=str(sum(map(bool, cases.values()))),
        time=f"{sum(result.seconds for result in outcome.results.values()):.3f}",
    )
    for name, reasons in cases.items():
        case = ElementTree.SubElement(
            suite, "testcase", classname="rbln-parity", name=_printable(name)
        )
        if reasons:
            failure = ElementTree.SubElement(case, "failure", message=_printable(reasons[0]))
            failure.text = _printable("\n".join(reasons))
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _finite(value: Any) -> Any:
    """Return the value with null for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _printable(text: str) -> str:
    """Return the text without control characters, which XML 1.0 forbids."""
    return "".join(char if char.isprintable() or char in "\t\n" else "?" for char in text)
