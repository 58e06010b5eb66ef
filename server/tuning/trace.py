"""A trace of requests: when each came, and how long its prompt and its answer were.

Reads JSON lines and CSV with the field names of the traces that are published; no text of any
request is needed, or looked at.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rbln_backend.scheduler.simulator import Arrival


@dataclass(frozen=True, slots=True)
class _Form:
    """The names of the three fields, and how the time becomes seconds."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]


_FORMS = (
    _Form("arrival_s", "prompt_tokens", "output_tokens", float),
    # Mooncake: milliseconds.
    _Form("timestamp", "input_length", "output_length", lambda ms: float(ms) / 1000.0),
    # BurstGPT.
    _Form("Timestamp", "Request tokens", "Response tokens", float),
    # Azure's LLM inference traces.
    _Form(
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        lambda text: datetime.fromisoformat(text[:26]).timestamp(),
    ),
)
KNOWN_FIELDS = "; ".join(f"{form.time}, {form.prompt}, {form.output}" for form in _FORMS)


def read_trace(path: Path) -> list[Arrival]:
    """Return the requests by time. Raises `OSError`, and `ValueError` that names the line."""
    found: list[tuple[float, int, int]] = []
    for number, row in _rows(path):
        try:
            found.append(_request(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no request")
    found.sort()
    # Requests that failed have no output.
    return [Arrival(at - found[0][0], prompt, output) for at, prompt, output in found if output]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from enumerate(csv.DictReader(file), start=2)
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
                yield number, row


def _request(row: Mapping[str, Any]) -> tuple[float, int, int]:
    for form in _FORMS:
        if form.time in row and form.prompt in row and form.output in row:
            prompt, output = int(row[form.prompt]), int(row[form.output])
            if prompt < 1 or output < 0:
                raise ValueError(f"{form.prompt} is {prompt} and {form.output} is {output}")
            return form.seconds(row[form.time]), prompt, output
    raise ValueError(f"none of the known sets of fields: {KNOWN_FIELDS}")
