"""Batches: the request for one, its row and its form in OpenAI's API, and queries of the tables.

Each query or change is within one transaction. A batch's status:

    validating -> in_progress -> finalizing -> completed | expired | cancelled
         |             +-> cancelling -^
         +-> failed
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from server.errors import InvalidValueError, describe
from server.storage.batch_lines import InputLine, Line, LineError, LineResult, duplicate_id
from server.storage.database import Page, find_row, new_id, page_of_rows
from server.storage.files import INPUT, StoredFile, find, insert
from server.storage.jobs import BATCHES
from server.wire import Endpoint

_MOMENTS = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at"),
)

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class Counts(TypedDict):
    """Numbers of lines of a batch."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Request to create a batch; times in seconds."""

    owner: str
    endpoint: str
    input_file: str
    window_s: int
    keep_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    idempotency: str | None = None

    @property
    def fingerprint(self) -> str:
        """Text that requests with the same idempotency key must have in common."""
        return json.dumps(
            [self.endpoint, self.input_file, self.window_s, self.keep_s, self.metadata],
            sort_keys=True,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """Row of the table of batches."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    status: Status
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
        """Return the batch of a row."""
        # The fields are in the order of the columns.
        batch = cls(*row)
        texts = ("metadata", "moments", "errors")
        return replace(batch, **{name: json.loads(getattr(batch, name)) for name in texts})

    @property
    def is_open(self) -> bool:
        """True until the batch has ended."""
        return self.status in BATCHES.open_statuses

    @property
    def unfinished(self) -> int:
        """Number of lines without a result."""
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
            "request_counts": Counts(
                total=self.total, completed=self.completed, failed=self.failed
            ),
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


def batch_request(body: CreateBatchBody, owner: str, idempotency: str | None) -> BatchRequest:
    """Validate a body. Raises `InvalidValueError`."""
    if body.endpoint not in [endpoint.value for endpoint in ENDPOINTS]:
        raise InvalidValueError(
            f"'endpoint' must be one of {', '.join(e.value for e in ENDPOINTS)}, got "
            f"{describe(body.endpoint)}.",
            param="endpoint",
        )
    if body.completion_window != "24h":
        raise InvalidValueError(
            f"'completion_window' must be '24h', got {describe(body.completion_window)}.",
            param="completion_window",
        )
    if idempotency is not None and not 0 < len(idempotency) <= _MAX_KEY:
        raise InvalidValueError(f"An Idempotency-Key has 1 to {_MAX_KEY} characters.")
    _check_metadata(body.metadata or {})
    expires = body.output_expires_after
    keep_s = expires.seconds if expires is not None else 0
    return BatchRequest(
        owner=owner,
        endpoint=body.endpoint,
        input_file=body.input_file_id,
        window_s=WINDOW_S,
        keep_s=keep_s,
        metadata=dict(body.metadata or {}),
        idempotency=idempotency,
    )


def _check_metadata(metadata: Mapping[str, str]) -> None:
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


def create(db: sqlite3.Connection, request: BatchRequest) -> Batch:
    """Insert a batch, or return the one with the same idempotency key.

    Raises `NotFoundError` for an unknown input file, and `InvalidValueError` for one of another
    purpose or a key that was used with another body.
    """
    if request.idempotency is not None:
        row = db.execute(
            "SELECT * FROM batches WHERE owner = ? AND idempotency = ?",
            (request.owner, request.idempotency),
        ).fetchone()
        if row is not None:
            return _require_same(Batch.of(row), request)
    file = find(db, request.owner, request.input_file, "input_file_id")
    if file.purpose != INPUT:
        raise InvalidValueError(
            f"'input_file_id' names a file of purpose {describe(file.purpose)}, not 'batch'.",
            param="input_file_id",
        )
    now, batch_id = int(time.time()), new_id("batch_")
    db.execute(
        "INSERT INTO batches VALUES (?, ?, ?, ?, 'validating', ?, ?, ?, ?, '{}', '[]', NULL, NULL, "
        "NULL, ?, ?, 0, 0, 0, 0, 0, 0, 0, 0)",
        (
            *(batch_id, request.owner, request.endpoint, request.input_file, now),
            *(now + request.window_s, request.keep_s, json.dumps(request.metadata)),
            *(request.idempotency, request.fingerprint),
        ),
    )
    return reload(db, batch_id)


def _require_same(batch: Batch, request: BatchRequest) -> Batch:
    if batch.fingerprint != request.fingerprint:
        raise InvalidValueError(
            f"The Idempotency-Key {describe(request.idempotency)} was used with another body, "
            f"for the batch {batch.id}."
        )
    return batch


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
    db.executemany(
        "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, 0)",
        (
            (batch_id, line.number, line.custom_id, line.place, line.bytes, line.shared)
            for line in lines
        ),
    )


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
    """Delete the lines of a batch."""
    db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))


def begin(db: sqlite3.Connection, batch_id: str, model: str | None) -> None:
    """Start a validated batch, unless it was cancelled during validation."""
    (total,) = db.execute("SELECT count(*) FROM lines WHERE batch = ?", (batch_id,)).fetchone()
    db.execute("UPDATE batches SET total = ?, model = ? WHERE id = ?", (total, model, batch_id))
    if reload(db, batch_id).status == "validating":
        move(db, batch_id, "in_progress")


def fail(db: sqlite3.Connection, batch_id: str, errors: Sequence[LineError]) -> None:
    """End a batch with errors in its input."""
    delete_lines(db, batch_id)
    db.execute("UPDATE batches SET errors = ? WHERE id = ?", (json.dumps(errors), batch_id))
    move(db, batch_id, "failed")


def move(db: sqlite3.Connection, batch_id: str, status: Status) -> None:
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
        db.execute(
            "UPDATE lines SET done = 1 WHERE batch = ? AND number = ?", (line.batch, line.number)
        )
        db.execute(
            f"UPDATE batches SET {kind} = {kind} + ?, {count} = {count} + 1, "
            "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
            "output_tokens = output_tokens + ? WHERE id = ?",
            (
                *(len(result.text), result.input_tokens, result.cached_tokens),
                *(result.output_tokens, line.batch),
            ),
        )


def end(db: sqlite3.Connection, batch: Batch, status: Status, files: Sequence[StoredFile]) -> None:
    """End a batch: insert its result files and delete its lines."""
    for file in files:
        insert(db, file)
        column = "error_file" if file.name.endswith("_error.jsonl") else "output_file"
        db.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (file.id, batch.id))
    delete_lines(db, batch.id)
    move(db, batch.id, status)


def input_files_in_use(db: sqlite3.Connection) -> list[str]:
    """Return the ids of the input files of open batches."""
    rows = db.execute(f"SELECT input_file FROM batches WHERE {BATCHES.is_open}")
    return [row[0] for row in rows]


def lines_to_do(db: sqlite3.Connection) -> int:
    """Return the number of lines of open batches without a result."""
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
