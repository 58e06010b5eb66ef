"""Reader of request traces: arrival times, prompt lengths and answer lengths.

Reads JSON lines and CSV with the field names of published traces. Texts are neither needed nor
read.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from server.tuning.simulator import Request

_FORMS: Mapping[tuple[str, str, str], Callable[[Any], float]] = {
    ("arrival_s", "prompt_tokens", "output_tokens"): float,
    # Mooncake: milliseconds.
    ("timestamp", "input_length", "output_length"): lambda ms: float(ms) / 1000.0,
    # BurstGPT.
    ("Timestamp", "Request tokens", "Response tokens"): float,
    # Azure's LLM inference traces.
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): (
        lambda text: datetime.fromisoformat(text[:26]).timestamp()
    ),
}
"""Field names of time, prompt and answer, and the conversion of time to seconds."""


def read_trace(path: Path) -> list[Request]:
    """Return the requests by time. Raises `OSError`, and `ValueError` that names the line."""
    found: list[tuple[float, int, int]] = []
    with path.open(encoding="utf-8", newline="") as file:
        # The first line of a CSV has the field names.
        is_csv = path.suffix == ".csv"
        rows: Iterator[Any] = csv.DictReader(file) if is_csv else iter(file)
        for number, row in enumerate(rows, start=2 if is_csv else 1):
            try:
                if is_csv or row.strip():
                    found.append(_request(row if is_csv else json.loads(row)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no request")
    first = min(found)[0]
    # Failed requests have no output.
    return [Request(at - first, prompt, output) for at, prompt, output in sorted(found) if output]


def _request(row: Mapping[str, Any]) -> tuple[float, int, int]:
    for names, seconds in _FORMS.items():
        if all(name in row for name in names):
            prompt, output = (int(row[name]) for name in names[1:])
            if prompt < 1 or output < 0:
                raise ValueError(f"{names[1]} is {prompt} and {names[2]} is {output}")
            return seconds(row[names[0]]), prompt, output
    known = "; ".join(map(", ".join, _FORMS))
    raise ValueError(f"none of the known sets of fields: {known}")
