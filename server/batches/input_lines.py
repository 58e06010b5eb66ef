"""The lines of a batch's input, read one after the other: what each asks, or what is wrong.

A line is `{"custom_id": …, "method": "POST", "url": …, "body": {…}}`. What it asks of the model is
checked when its turn comes, as a request over HTTP would be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json, to_json

from server.batches.batch import LineError
from server.errors import InvalidJsonError, UnsupportedFieldError, describe
from server.request.body import parse_json_object

MAX_ID_CHARS = 512
MAX_DEPTH = 190
"""Of a line."""
_SHARED_CHARS = 2000
"""Of the first message: lines that begin alike run one after the other, for prefix hits."""


@dataclass(frozen=True, slots=True)
class InputLine:
    """Where a line lies in the file, in bytes, and what it is sorted by."""

    number: int
    custom_id: str
    place: int
    bytes: int
    model: str | None
    shared: str


@dataclass(frozen=True, slots=True)
class LineRules:
    """What the lines of one batch must have in common, and how large they may be."""

    endpoint: str
    max_lines: int
    max_bytes: int


def read_lines(path: Path, rules: LineRules) -> Iterator[InputLine | LineError]:
    """Yield each line, or what is wrong with it; ends after the first that is one too many."""
    number = place = 0
    with path.open("rb") as file:
        while raw := file.readline(rules.max_bytes + 1):
            begin, place = place, place + len(raw)
            if len(raw) > rules.max_bytes:
                number += 1
                yield _error(
                    "line_too_long",
                    number,
                    f"The line has more than {rules.max_bytes} bytes (--max-body-bytes).",
                )
                place += _skip_line(file, rules.max_bytes)
                continue
            if not raw.strip():
                continue
            number += 1
            if number > rules.max_lines:
                yield _error(
                    "too_many_tasks",
                    None,
                    f"There are more than {rules.max_lines} lines (--max-batch-lines).",
                )
                return
            yield _read(raw, number, begin, rules)
    if not number:
        yield _error("empty_file", None, "The file has no lines.")


def same_name(line: InputLine) -> LineError:
    """Return what is wrong with a line whose id another one has."""
    message = f"'custom_id' {describe(line.custom_id)} is that of an earlier line."
    return _error("duplicate_custom_id", line.number, message, "custom_id")


def body_of(raw: bytes) -> bytes:
    """Return the body of a line that was read before, as JSON. Raises `UnsupportedFieldError`."""
    body = from_json(raw)["body"]
    if body.get("stream"):
        raise UnsupportedFieldError("'stream' is not for lines of a batch.", param="stream")
    return to_json(body)


def _skip_line(file: BinaryIO, step: int) -> int:
    skipped = 0
    while rest := file.readline(step):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _read(raw: bytes, number: int, place: int, rules: LineRules) -> InputLine | LineError:
    try:
        line = parse_json_object(raw, MAX_DEPTH)
    except InvalidJsonError as error:
        return _error("invalid_json_line", number, f"This line is no JSON object: {error.message}")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        return _error(
            "invalid_custom_id",
            number,
            "'custom_id' must be a string of 1 to "
            f"{MAX_ID_CHARS} characters, got {describe(custom_id)}.",
            "custom_id",
        )
    if line.get("method") != "POST":
        return _error(
            "invalid_method",
            number,
            f"'method' must be 'POST', got {describe(line.get('method'))}.",
            "method",
        )
    if line.get("url") != rules.endpoint:
        return _error(
            "mismatched_url",
            number,
            f"'url' is {describe(line.get('url'))}, and the "
            f"batch's endpoint {describe(rules.endpoint)}.",
            "url",
        )
    if not isinstance(body, dict):
        return _error("invalid_body", number, "'body' must be an object.", "body")
    unknown = sorted(line.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        return _error("unknown_field", number, f"A line has no {describe(unknown[0])}.", unknown[0])
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        return _error(
            "invalid_model",
            number,
            f"'model' must be a string, got {describe(model)}.",
            "body.model",
        )
    return InputLine(number, custom_id, place, len(raw), model, _shared(body))


def _shared(body: dict[str, Any]) -> str:
    """Return what lines of one model, or adapter, have in common that begin alike."""
    messages = body.get("messages") or body.get("input")
    first = messages[0] if isinstance(messages, list) and messages else None
    content = first.get("content") if isinstance(first, dict) else None
    begin = f"{body.get('model')} {content or body.get('instructions') or ''}"[:_SHARED_CHARS]
    return hashlib.blake2b(begin.encode(errors="replace"), digest_size=8).hexdigest()


def _error(code: str, line: int | None, message: str, param: str | None = None) -> LineError:
    return LineError(code=code, line=line, message=message, param=param)
