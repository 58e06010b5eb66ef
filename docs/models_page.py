"""Tables of model families, from the results of docs/models.py and the backend's refusals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rbln_backend.unsupported import FEATURES

RESULTS = Path(__file__).resolve().parent / "models.json"
PARTS = ("alone", "batch", "prefix hits")
HEADER = (
    "Family",
    "Architecture",
    "KV caches",
    *(f"Equal, {part}" for part in PARTS),
    "Tokens hit",
    "Largest difference of logprobs",
    "Mean",
    "Particular fields",
)


def load_results() -> dict[str, Any]:
    """Return the stored results by family; empty before the first run."""
    if not RESULTS.is_file():
        return {}
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def family_rows(results: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    """Return a row of the table for every measured family."""
    for name, result in results.items():
        if "error" in result:
            yield name, *[""] * (len(HEADER) - 2), f"did not run: {result['error']}"
            continue
        parts = [result["parts"][part] for part in PARTS]
        weights = [part["tokens"] for part in parts]
        mean = sum(p["mean_delta"] * w for p, w in zip(parts, weights, strict=True)) / sum(weights)
        yield (
            name,
            f"`{result['architecture']}`",
            ", ".join(result["kv_caches"]),
            *(_equal(part) for part in parts),
            str(result["hit_tokens"]),
            f"{max(part['max_delta'] for part in parts):.1e}",
            f"{mean:.1e}",
            result["particular"],
        )


def _equal(part: Mapping[str, Any]) -> str:
    if part["equal"] == part["requests"]:
        return f"{part['equal_tokens']} of {part['tokens']}"
    return f"**{part['equal_tokens']} of {part['tokens']}**"


def conditions(results: Mapping[str, Any]) -> list[str]:
    """Return one line for each set of versions and machine of the results."""
    groups: dict[str, list[str]] = {}
    for name, result in results.items():
        versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        line = f"{result['measured']}, commit {result['commit']}, {result['cpu']}; {versions}"
        groups.setdefault(line, []).append(name)
    if len(groups) == 1:
        return [f"Measured {line}." for line in groups]
    return [f"- {', '.join(names)}: measured {line}." for line, names in groups.items()]


def refusal_rows() -> Iterable[Sequence[str]]:
    """Return a row for each refusal of the backend."""
    for feature in FEATURES:
        yield feature.name, feature.known_from, feature.why, feature.instead
