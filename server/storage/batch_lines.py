"""Lines of a batch: those of its input file, validated one by one, and their results.

An input line is `{"custom_id": …, "method": "POST", "url": …, "body": {…}}`. Its body is validated
when the line runs, by the code that validates HTTP requests. Results are lines of OpenAI's output
and error files.
"""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Raw, Struct
from typing_extensions import TypedDict

from server.errors import UnsupportedFieldError, describe
from server.storage.jobs import LoopbackResponse
from server.storage.raw_json import (
    JsonSyntaxError,
    ShapeError,
    UnknownNameError,
    decode,
    described,
    fields_of,
    first_item,
    in_one_line,
    object_of,
    string_of,
)

_MAX_ID_CHARS = 512
_SHARED_BYTES = 2000
"""Bytes of the first message that group lines with a common prefix."""
_KNOWN_PREFIXES = 1 << 16
"""Bound of the prefixes in memory (about 10 MB); the oldest is forgotten."""
_ABSENT = Raw(b"")


class _Line(Struct, forbid_unknown_fields=True):
    """Fields of a line, all optional, so that errors name the first wrong one."""

    custom_id: Raw = _ABSENT
    method: Raw = _ABSENT
    url: Raw = _ABSENT
    body: Raw = _ABSENT


class LineError(TypedDict):
    """Error in the input; the first line is 1."""

    code: str
    line: int | None
    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class InputLine:
    """Valid line: its offset and length in bytes, and its sort key `shared`.

    `shared` is equal for lines with a common prefix, and ascends with their first line.
    """

    number: int
    custom_id: str
    place: int
    bytes: int
    model: str | None
    shared: str


class _Groups:
    """Sort keys of prefixes, in the order of their first lines.

    So lines of different prefixes are added to the end of the index, and not to random pages.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, str] = OrderedDict()

    def key(self, prefix: bytes, number: int) -> str:
        """Return the key of the prefix's first line, or of `number` if it is the first."""
        found = self._keys.get(prefix)
        if found is None:
            if len(self._keys) == _KNOWN_PREFIXES:
                self._keys.popitem(last=False)
            found = self._keys[prefix] = f"{number:012}"
        return found


@dataclass(frozen=True, slots=True)
class LineRules:
    """Endpoint of all lines of a batch, and limits on their number and size."""

    endpoint: str
    max_lines: int
    max_bytes: int


def read_lines(path: Path, rules: LineRules) -> Iterator[InputLine | LineError]:
    """Yield each line, or its error. Stops at the first line beyond `max_lines`."""
    number = place = 0
    groups = _Groups()
    with path.open("rb") as file:
        while raw := file.readline(rules.max_bytes + 1):
            begin, place = place, place + len(raw)
            if not begin and raw.startswith(BOM_UTF8):
                raw, begin = raw.removeprefix(BOM_UTF8), len(BOM_UTF8)
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
            yield _read(raw, number, begin, rules, groups)
    if not number:
        yield _error("empty_file", None, "The file has no lines.")


def duplicate_id(number: int, custom_id: str) -> LineError:
    """Return the error of a line whose `custom_id` is not unique."""
    message = f"'custom_id' {describe(custom_id)} is that of an earlier line."
    return _error("duplicate_custom_id", number, message, "custom_id")


def body_of(raw: bytes) -> bytes:
    """Return the JSON body of a valid line. Raises `UnsupportedFieldError`."""
    body = fields_of(raw, "body")["body"]
    if fields_of(body, "stream").get("stream") == b"true":
        raise UnsupportedFieldError(
            "'stream' is not supported in lines of a batch.", param="stream"
        )
    return body


def _skip_line(file: BinaryIO, step: int) -> int:
    skipped = 0
    while rest := file.readline(step):
        skipped += len(rest)
        if rest.endswith(b"\n"):
            break
    return skipped


def _read(
    raw: bytes, number: int, place: int, rules: LineRules, groups: _Groups
) -> InputLine | LineError:
    try:
        line = decode(raw, _Line)
    except UnknownNameError as error:
        return _error("unknown_field", number, f"Unknown field {describe(error.name)}.", error.name)
    except (JsonSyntaxError, ShapeError) as error:
        return _error("invalid_json_line", number, f"The line is not a JSON object: {error}.")
    custom_id = string_of(bytes(line.custom_id))
    if custom_id is None or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        return _error(
            "invalid_custom_id",
            number,
            "'custom_id' must be a string of 1 to "
            f"{_MAX_ID_CHARS} characters, got {_described(line.custom_id)}.",
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
            f"'url' must be the batch's endpoint {describe(rules.endpoint)}, got "
            f"{_described(line.url)}.",
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
    shared = groups.key(_prefix(fields), number)
    return InputLine(number, custom_id, place, len(raw), string_of(model), shared)


def _described(value: Raw) -> str:
    return described(None if value is _ABSENT else bytes(value))


def _prefix(fields: dict[str, bytes]) -> bytes:
    """Return a digest that is equal for lines with the same model and first message prefix."""
    first = first_item(fields.get("messages") or fields.get("input"))
    content = None
    if first is not None and first[:1] == b"{":
        content = fields_of(first, "content").get("content")
    begin = content or fields.get("instructions") or b""
    text = fields.get("model", b"") + b" " + begin[:_SHARED_BYTES]
    return hashlib.blake2b(text, digest_size=8).digest()


def _error(code: str, line: int | None, message: str, param: str | None = None) -> LineError:
    return LineError(code=code, line=line, message=message, param=param)


_OK = 200
_NEVER_RUN = {
    "expired": ("batch_expired", "This line was not run before the batch expired."),
    "cancelled": ("batch_cancelled", "This line was not run: the batch was cancelled."),
}


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a batch without a result; `place` and `bytes` locate it in the input file."""

    batch: str
    number: int
    custom_id: str
    place: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LineResult:
    """Result of a line: a line of JSON, and its token counts."""

    line: Line
    succeeded: bool
    text: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def kind(self) -> str:
        """Kind of its result file, a key of `Batch.result_bytes`."""
        return "output" if self.succeeded else "error"


def result_of(line: Line, answer: LoopbackResponse) -> LineResult:
    """Return the result of a line that ran, with the unchanged body of the response."""
    usage = msgspec.json.decode(fields_of(answer.body, "usage").get("usage", b"null"))
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": Raw(in_one_line(answer.body)),
    }
    return LineResult(
        line,
        answer.status == _OK,
        _text(line, response=response, error=None),
        *_tokens(usage if isinstance(usage, dict) else {}),
    )


def never_run(line: Line, why: str) -> LineResult:
    """Return the result of a line that did not run: its batch was `expired` or `cancelled`."""
    code, message = _NEVER_RUN[why]
    text = _text(line, response=None, error={"code": code, "message": message})
    return LineResult(line, False, text)


def _text(line: Line, *, response: Any, error: Any) -> bytes:
    name = f"batch_req_{line.batch.removeprefix('batch_')}_{line.number}"
    result = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
    return object_of(result) + b"\n"


def _tokens(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of prompt tokens, cached prompt tokens and completion tokens."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return (
        int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        int(usage.get("completion_tokens") or usage.get("output_tokens") or 0),
    )
