"""The lines of a batch's input, read one after the other: what each asks, or what is wrong.

A line is `{"custom_id": …, "method": "POST", "url": …, "body": {…}}`. Its body is not parsed here:
what it asks of the model is checked when its turn comes, as a request over HTTP would be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from msgspec import Raw, Struct

from server.batches.batch import LineError
from server.errors import UnsupportedFieldError, describe
from server.storage.raw_json import (
    JsonSyntaxError,
    ShapeError,
    UnknownNameError,
    decode,
    described,
    fields_of,
    first_item,
    string_of,
)

MAX_ID_CHARS = 512
_SHARED_BYTES = 2000
"""Of the first message: lines that begin alike run one after the other, for prefix hits."""
_ABSENT = Raw(b"")


class _Line(Struct, forbid_unknown_fields=True):
    """A line; no field is required, so that the first one that is wrong can be named."""

    custom_id: Raw = _ABSENT
    method: Raw = _ABSENT
    url: Raw = _ABSENT
    body: Raw = _ABSENT


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
    body = fields_of(raw, "body")["body"]
    if fields_of(body, "stream").get("stream") == b"true":
        raise UnsupportedFieldError("'stream' is not for lines of a batch.", param="stream")
    return body


def _skip_line(file: BinaryIO, step: int) -> int:
    skipped = 0
    while rest := file.readline(step):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _read(raw: bytes, number: int, place: int, rules: LineRules) -> InputLine | LineError:
    try:
        line = decode(raw, _Line)
    except UnknownNameError as error:
        return _error("unknown_field", number, f"A line has no {describe(error.name)}.", error.name)
    except (JsonSyntaxError, ShapeError) as error:
        return _error("invalid_json_line", number, f"This line is no JSON object: {error}.")
    custom_id = string_of(bytes(line.custom_id))
    if custom_id is None or not 0 < len(custom_id) <= MAX_ID_CHARS:
        return _error(
            "invalid_custom_id",
            number,
            "'custom_id' must be a string of 1 to "
            f"{MAX_ID_CHARS} characters, got {_described(line.custom_id)}.",
            "custom_id",
        )
    if string_of(bytes(line.method)) != "POST":
        return _error(
            "invalid_method",
            number,
            f"'method' must be 'POST', got {_described(line.method)}.",
            "method",
        )
    if string_of(bytes(line.url)) != rules.endpoint:
        return _error(
            "mismatched_url",
            number,
            f"'url' is {_described(line.url)}, and the "
            f"batch's endpoint {describe(rules.endpoint)}.",
            "url",
        )
    body = bytes(line.body)
    if body[:1] != b"{":
        return _error("invalid_body", number, "'body' must be an object.", "body")
    fields = fields_of(body, "model", "messages", "input", "instructions")
    model = fields.get("model", b"null")
    if model != b"null" and string_of(model) is None:
        return _error(
            "invalid_model",
            number,
            f"'model' must be a string, got {described(model)}.",
            "body.model",
        )
    return InputLine(number, custom_id, place, len(raw), string_of(model), _shared(fields))


def _described(value: Raw) -> str:
    return described(None if value is _ABSENT else bytes(value))


def _shared(fields: dict[str, bytes]) -> str:
    """Return a digest that lines of one model, or adapter, share if they begin alike."""
    first = first_item(fields.get("messages") or fields.get("input"))
    content = None
    if first is not None and first[:1] == b"{":
        content = fields_of(first, "content").get("content")
    begin = content or fields.get("instructions") or b""
    text = fields.get("model", b"") + b" " + begin[:_SHARED_BYTES]
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _error(code: str, line: int | None, message: str, param: str | None = None) -> LineError:
    return LineError(code=code, line=line, message=message, param=param)
