"""Batches: their input lines and results, their rows, and queries of their tables.

An input line is `{"custom_id": …, "method": "POST", "url": …, "body": {…}}`. Its body is validated
when the line runs, by the code that validates HTTP requests. Results are lines of OpenAI's output
and error files. Each query or change is within one transaction. A batch's status:

    validating -> in_progress -> finalizing -> completed | expired | cancelled
         |             +-> cancelling -^
         +-> failed
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from codecs import BOM_UTF8
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from server.errors import InvalidValueError, UnsupportedFieldError, describe, invalid_value
from server.storage.database import BATCHES, Page, find_row, new_id, page_of_rows
from server.storage.files import INPUT, StoredFile, find, insert
from server.storage.jobs import LoopbackResponse
from server.storage.raw_json import (
    JsonSyntaxError,
    ShapeError,
    UnknownNameError,
    decode,
    described,
    first_item,
    get_fields,
    get_string,
    in_one_line,
    make_object,
)
from server.wire import Endpoint

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


@dataclass(frozen=True, slots=True)
class LineRules:
    """Endpoint of all lines of a batch, and limits on their number and size."""

    endpoint: str
    max_lines: int
    max_bytes: int


def read_lines(path: Path, rules: LineRules) -> Iterator[InputLine | LineError]:
    """Yield each line, or its error. Stops at the first line beyond `max_lines`."""
    number = place = 0
    groups: OrderedDict[bytes, str] = OrderedDict()
    with path.open("rb") as file:
        while raw := file.readline(rules.max_bytes + 1):
            begin, place = place, place + len(raw)
            if not begin and raw.startswith(BOM_UTF8):
                raw, begin = raw.removeprefix(BOM_UTF8), len(BOM_UTF8)
            if len(raw) > rules.max_bytes:
                number += 1
                message = f"The line has more than {rules.max_bytes} bytes (--max-body-bytes)."
                yield _error("line_too_long", number, message)
                while rest := file.readline(rules.max_bytes):
                    place += len(rest)
                    if rest.endswith(b"\n"):
                        break
                continue
            if not raw.strip():
                continue
            number += 1
            if number > rules.max_lines:
                message = f"There are more than {rules.max_lines} lines (--max-batch-lines)."
                yield _error("too_many_tasks", None, message)
                return
            yield _read(raw, number, begin, rules, groups)
    if not number:
        yield _error("empty_file", None, "The file has no lines.")


def duplicate_id(number: int, custom_id: str) -> LineError:
    """Return the error of a line whose `custom_id` is not unique."""
    message = f"'custom_id' {describe(custom_id)} is that of an earlier line."
    return _error("duplicate_custom_id", number, message, "custom_id")


def get_body(raw: bytes) -> bytes:
    """Return the JSON body of a valid line. Raises `UnsupportedFieldError`."""
    body = get_fields(raw, "body")["body"]
    if get_fields(body, "stream").get("stream") == b"true":
        raise UnsupportedFieldError(
            "'stream' is not supported in lines of a batch.", param="stream"
        )
    return body


def _read(
    raw: bytes, number: int, place: int, rules: LineRules, groups: OrderedDict[bytes, str]
) -> InputLine | LineError:
    """Return a line or its error; `groups` are the sort keys of the prefixes before it.

    A prefix sorts as its first line, so that lines of new prefixes are added to the end of the
    index and not to random pages.
    """
    try:
        line = decode(raw, _Line)
    except UnknownNameError as error:
        return _error("unknown_field", number, f"Unknown field {describe(error.name)}.", error.name)
    except (JsonSyntaxError, ShapeError) as error:
        return _error("invalid_json_line", number, f"The line is not a JSON object: {error}.")
    custom_id = get_string(bytes(line.custom_id))
    if custom_id is None or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        must = f"be a string of 1 to {_MAX_ID_CHARS} characters"
        return _wrong("invalid_custom_id", number, "custom_id", must, line.custom_id)
    if get_string(bytes(line.method)) != "POST":
        return _wrong("invalid_method", number, "method", "be 'POST'", line.method)
    if get_string(bytes(line.url)) != rules.endpoint:
        must = f"be the batch's endpoint {describe(rules.endpoint)}"
        return _wrong("mismatched_url", number, "url", must, line.url)
    body = bytes(line.body)
    if body[:1] != b"{":
        return _error("invalid_body", number, "'body' must be an object.", "body")
    fields = get_fields(body, "model", "messages", "input", "instructions")
    model = fields.get("model", b"null")
    if model != b"null" and get_string(model) is None:
        message = f"'model' must be a string, got {described(model)}."
        return _error("invalid_model", number, message, "body.model")
    prefix = _prefix(fields)
    shared = groups.get(prefix)
    if shared is None:
        if len(groups) == _KNOWN_PREFIXES:
            groups.popitem(last=False)
        shared = groups[prefix] = f"{number:012}"
    return InputLine(number, custom_id, place, len(raw), get_string(model), shared)


def _wrong(code: str, line: int, name: str, must: str, value: Raw) -> LineError:
    got = described(None if value is _ABSENT else bytes(value))
    return _error(code, line, f"'{name}' must {must}, got {got}.", name)


def _prefix(fields: dict[str, bytes]) -> bytes:
    """Return a digest that is equal for lines with the same model and first message prefix."""
    first = first_item(fields.get("messages") or fields.get("input"))
    content = None
    if first is not None and first[:1] == b"{":
        content = get_fields(first, "content").get("content")
    begin = content or fields.get("instructions") or b""
    text = fields.get("model", b"") + b" " + begin[:_SHARED_BYTES]
    return hashlib.blake2b(text, digest_size=8).digest()


def _error(code: str, line: int | None, message: str, param: str | None = None) -> LineError:
    return LineError(code=code, line=line, message=message, param=param)


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


def make_result(line: Line, answer: LoopbackResponse) -> LineResult:
    """Return the result of a line that ran, with the unchanged body of the response."""
    usage = msgspec.json.decode(get_fields(answer.body, "usage").get("usage", b"null"))
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": Raw(in_one_line(answer.body)),
    }
    return LineResult(
        line,
        answer.status == 200,
        _text(line, response=response, error=None),
        input_tokens=int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or usage.get("output_tokens") or 0),
    )


def never_run(line: Line, why: str) -> LineResult:
    """Return the result of a line that did not run: its batch was `expired` or `cancelled`."""
    code, message = _NEVER_RUN[why]
    text = _text(line, response=None, error={"code": code, "message": message})
    return LineResult(line, False, text)


def _text(line: Line, *, response: Any, error: Any) -> bytes:
    name = f"batch_req_{line.batch.removeprefix('batch_')}_{line.number}"
    result = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
    return make_object(result) + b"\n"


_MOMENTS = tuple(
    "in_progress_at finalizing_at completed_at failed_at expired_at cancelling_at "
    "cancelled_at".split()
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Row of the table of batches."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    status: str
    created_at: int
    expires_at: int
    keep_s: int
    metadata: dict[str, str]
    moments: dict[str, int]
    errors: list[LineError]
    output_file: str | None
    error_file: str | None
    model: str | None
    idempotency: str | None
    fingerprint: str
    total: int
    completed: int
    failed: int
    output_bytes: int
    error_bytes: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, row: sqlite3.Row) -> Batch:
        # The fields are in the order of the columns.
        batch = cls(*row)
        texts = ("metadata", "moments", "errors")
        return replace(batch, **{name: json.loads(getattr(batch, name)) for name in texts})

    @property
    def is_open(self) -> bool:
        return self.status in BATCHES.open_statuses

    @property
    def unfinished(self) -> int:
        return self.total - self.completed - self.failed

    @property
    def result_bytes(self) -> dict[str, int]:
        """Bytes of counted results, by the kind of their file."""
        return {"output": self.output_bytes, "error": self.error_bytes}

    def shown(self) -> dict[str, Any]:
        """Return the batch object of OpenAI's API; times are Unix seconds."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file,
            "completion_window": f"{(self.expires_at - self.created_at) // 3600}h",
            "status": self.status,
            "output_file_id": self.output_file,
            "error_file_id": self.error_file,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.moments.get(name) for name in _MOMENTS},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            "metadata": self.metadata or None,
        }


ENDPOINTS = (Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.EMBEDDINGS, Endpoint.RESPONSES)
"""Endpoints that lines of a batch may name."""
WINDOW_S = 24 * 3600
_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512
SHORTEST_S, LONGEST_S = 3600, 30 * 24 * 3600
_MAX_KEY = 255


class ExpiresAfter(BaseModel):
    """Expiry of a file."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"] = Field(description="The time is counted from the creation.")
    seconds: int = Field(description="3600 to 2592000.", ge=SHORTEST_S, le=LONGEST_S)


class CreateBatchBody(BaseModel):
    """Body of `POST /v1/batches`."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str = Field(description="A file of purpose `batch`.")
    endpoint: str = Field(description=f"One of {', '.join(e.value for e in ENDPOINTS)}.")
    completion_window: str = Field(description="Only `24h`.")
    metadata: dict[str, str] | None = Field(None, description="Up to 16 pairs of strings.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When the files of answers are deleted."
    )


def check_batch(body: CreateBatchBody, idempotency: str | None) -> None:
    """Raise `InvalidValueError` for a body or an idempotency key that cannot be used."""
    known = [endpoint.value for endpoint in ENDPOINTS]
    if body.endpoint not in known:
        raise invalid_value("endpoint", f"be one of {', '.join(known)}", body.endpoint)
    if body.completion_window != "24h":
        raise invalid_value("completion_window", "be '24h'", body.completion_window)
    if idempotency is not None and not 0 < len(idempotency) <= _MAX_KEY:
        raise InvalidValueError(f"An Idempotency-Key has 1 to {_MAX_KEY} characters.")
    metadata = body.metadata or {}
    if len(metadata) > _MAX_PAIRS:
        raise InvalidValueError(
            f"'metadata' has {len(metadata)} pairs, and at most {_MAX_PAIRS} may be.",
            param="metadata",
        )
    for name, value in metadata.items():
        if len(name) > _MAX_NAME or len(value) > _MAX_VALUE:
            raise InvalidValueError(
                f"'metadata': names have at most {_MAX_NAME} characters and values {_MAX_VALUE}; "
                f"{describe(name)} has more.",
                param="metadata",
            )


def create(
    db: sqlite3.Connection, owner: str, body: CreateBatchBody, idempotency: str | None
) -> Batch:
    """Insert a batch for a valid body, or return the one with the same idempotency key.

    Raises `NotFoundError` for an unknown input file, and `InvalidValueError` for one of another
    purpose or a key that was used with another body.
    """
    expires, metadata = body.output_expires_after, body.metadata or {}
    keep_s = expires.seconds if expires is not None else 0
    # What requests with the same idempotency key must have in common.
    fingerprint = json.dumps(
        [body.endpoint, body.input_file_id, WINDOW_S, keep_s, metadata], sort_keys=True
    )
    if idempotency is not None:
        row = db.execute(
            "SELECT * FROM batches WHERE owner = ? AND idempotency = ?", (owner, idempotency)
        ).fetchone()
        if row is not None:
            batch = Batch.of(row)
            if batch.fingerprint != fingerprint:
                raise InvalidValueError(
                    f"The Idempotency-Key {describe(idempotency)} was used with another body, "
                    f"for the batch {batch.id}."
                )
            return batch
    file = find(db, owner, body.input_file_id, "input_file_id")
    if file.purpose != INPUT:
        raise InvalidValueError(
            f"'input_file_id' names a file of purpose {describe(file.purpose)}, not 'batch'.",
            param="input_file_id",
        )
    now, batch_id = int(time.time()), new_id("batch_")
    first_columns = batch_id, owner, body.endpoint, file.id, now, now + WINDOW_S, keep_s
    db.execute(
        "INSERT INTO batches VALUES (?, ?, ?, ?, 'validating', ?, ?, ?, ?, '{}', '[]', NULL, NULL, "
        "NULL, ?, ?, 0, 0, 0, 0, 0, 0, 0, 0)",
        (*first_columns, json.dumps(metadata), idempotency, fingerprint),
    )
    return reload(db, batch_id)


def get(db: sqlite3.Connection, owner: str, batch_id: str) -> Batch:
    """Return a batch of an owner. Raises `NotFoundError`."""
    return Batch.of(find_row(db, "batches", owner, batch_id, "batch_id"))


def list_page(db: sqlite3.Connection, owner: str, page: Page) -> tuple[list[Batch], bool]:
    """Return a page of an owner's batches, and whether more follow. Raises `NotFoundError`."""
    rows, more = page_of_rows(db, "batches", owner, page)
    return [Batch.of(row) for row in rows], more


def unfinished(db: sqlite3.Connection) -> list[Batch]:
    """Return the open batches, the oldest first."""
    rows = db.execute(f"SELECT * FROM batches WHERE {BATCHES.is_open} ORDER BY created_at, id")
    return [Batch.of(row) for row in rows]


def reload(db: sqlite3.Connection, batch_id: str) -> Batch:
    """Return a batch by its id alone."""
    return Batch.of(db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone())


def add_lines(db: sqlite3.Connection, batch_id: str, lines: Iterable[InputLine]) -> None:
    """Insert lines; `duplicates` then finds `custom_id`s that are not unique."""
    rows = ((batch_id, x.number, x.custom_id, x.place, x.bytes, x.shared) for x in lines)
    db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, 0)", rows)


def duplicates(db: sqlite3.Connection, batch_id: str, limit: int) -> list[LineError]:
    """Return errors of the first `limit` lines with the `custom_id` of an earlier line.

    One sort of all names: an index of them would be read and written at random for each line.
    """
    rows = db.execute(
        "SELECT number, custom_id FROM (SELECT number, custom_id, row_number() OVER "
        "(PARTITION BY custom_id ORDER BY number) AS nth FROM lines WHERE batch = ?) "
        "WHERE nth > 1 ORDER BY number LIMIT ?",
        (batch_id, limit),
    )
    return [duplicate_id(number, custom_id) for number, custom_id in rows]


def delete_lines(db: sqlite3.Connection, batch_id: str) -> None:
    db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))


def begin(db: sqlite3.Connection, batch_id: str, model: str | None) -> None:
    """Start a validated batch, unless it was cancelled during validation."""
    (total,) = db.execute("SELECT count(*) FROM lines WHERE batch = ?", (batch_id,)).fetchone()
    db.execute("UPDATE batches SET total = ?, model = ? WHERE id = ?", (total, model, batch_id))
    if reload(db, batch_id).status == "validating":
        move(db, batch_id, "in_progress")


def fail(db: sqlite3.Connection, batch_id: str, errors: Sequence[LineError]) -> None:
    delete_lines(db, batch_id)
    db.execute("UPDATE batches SET errors = ? WHERE id = ?", (json.dumps(errors), batch_id))
    move(db, batch_id, "failed")


def move(db: sqlite3.Connection, batch_id: str, status: str) -> None:
    """Enter a status and record the time."""
    moments = reload(db, batch_id).moments | {f"{status}_at": int(time.time())}
    db.execute(
        "UPDATE batches SET status = ?, moments = ? WHERE id = ?",
        (status, json.dumps(moments), batch_id),
    )


def cancel(db: sqlite3.Connection, owner: str, batch_id: str) -> Batch:
    """Start the cancellation of a batch. Raises `NotFoundError`, `InvalidValueError` if ended."""
    batch = get(db, owner, batch_id)
    if not batch.is_open:
        raise InvalidValueError(
            f"The batch {batch.id} is {batch.status} and cannot be cancelled.", param="batch_id"
        )
    if batch.status in ("validating", "in_progress"):
        move(db, batch_id, "cancelling")
    return reload(db, batch_id)


def waiting_lines(
    db: sqlite3.Connection, batch_id: str, busy: Sequence[int], limit: int
) -> list[Line]:
    """Return lines without a result that are not `busy`, grouped by common prefix."""
    marks = ", ".join("?" * len(busy))
    rows = db.execute(
        "SELECT batch, number, custom_id, place, bytes FROM lines WHERE batch = ? AND NOT done "
        f"AND number NOT IN ({marks}) ORDER BY shared, number LIMIT ?",
        (batch_id, *busy, limit),
    )
    return [Line(**dict(row)) for row in rows]


def count_results(db: sqlite3.Connection, results: Sequence[LineResult]) -> None:
    """Count results that are on the disk."""
    for result in results:
        line = result.line
        kind, count = f"{result.kind}_bytes", "completed" if result.succeeded else "failed"
        tokens = result.input_tokens, result.cached_tokens, result.output_tokens
        db.execute(
            "UPDATE lines SET done = 1 WHERE batch = ? AND number = ?", (line.batch, line.number)
        )
        db.execute(
            f"UPDATE batches SET {kind} = {kind} + ?, {count} = {count} + 1, "
            "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
            "output_tokens = output_tokens + ? WHERE id = ?",
            (len(result.text), *tokens, line.batch),
        )


def end(db: sqlite3.Connection, batch: Batch, status: str, files: Sequence[StoredFile]) -> None:
    """End a batch: insert its result files and delete its lines."""
    for file in files:
        insert(db, file)
        column = "error_file" if file.name.endswith("_error.jsonl") else "output_file"
        db.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (file.id, batch.id))
    delete_lines(db, batch.id)
    move(db, batch.id, status)


def lines_to_do(db: sqlite3.Connection) -> int:
    (count,) = db.execute(
        f"SELECT coalesce(sum(total - completed - failed), 0) FROM batches WHERE {BATCHES.is_open}"
    ).fetchone()
    return int(count)


def delete_old(db: sqlite3.Connection, keep_s: int, now: int) -> None:
    """Delete ended batches that were created more than `keep_s` seconds before `now`."""
    db.execute(
        f"DELETE FROM batches WHERE created_at + ? < ? AND NOT {BATCHES.is_open}",
        (max(keep_s, 1), now),
    )
