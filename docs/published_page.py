"""The table of published models, from the results of docs/published.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "published.json"
PUBLISHED_HEADER = ("Model", "Runs", "Weights", "KV caches", "With, or why not")
_GIB = 1 << 30


def load_verdicts() -> dict[str, Any]:
    """Return the stored verdicts by model; empty before the first run."""
    if not RESULTS.is_file():
        return {}
    verdicts: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return verdicts


def published_rows() -> Iterable[Sequence[str]]:
    """Return a row of the table for every model; models that run come first."""
    verdicts = load_verdicts()
    for name, verdict in sorted(verdicts.items(), key=lambda item: "reason" in item[1]):
        if "reason" in verdict:
            yield name, "no", "", "", verdict["reason"]
            continue
        size = f"{_size(verdict['weight_bytes'])}, {verdict['dtype']}"
        if verdict["quantized_layers"]:
            size = f"{size}; {verdict['quantized_layers']}"
        flags = f"`{verdict['flags']}`" if verdict["flags"] else ""
        caches = ", ".join(verdict["kv_caches"]) or "none"
        yield name, "pools" if verdict["task"] == "pools" else "yes", size, caches, flags


def _size(num_bytes: int) -> str:
    if num_bytes < _GIB:
        return f"{num_bytes / (1 << 20):,.0f} MiB"
    return f"{num_bytes / _GIB:,.1f} GiB"


def published_summary() -> str:
    """Return one sentence with the counts."""
    verdicts = load_verdicts()
    runs = sum("reason" not in verdict for verdict in verdicts.values())
    return f"{runs} of {len(verdicts)} run."
