"""Batches and their lines in the database: every change of a state is here, as one transaction."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.batches.batch import OPEN, Api, Batch, BatchRequest, LineError, Status
from server.batches.input_lines import InputLine, same_name
from server.errors import InvalidValueError, NotFoundError, describe
from server.storage.files import Page, StoredFile, find, insert, new_id, paged

_API = "substr(id, 1, instr(id, '_'))"
"""What the id of a batch begins with, a value of `Api`."""
_OPEN = f"status IN ({', '.join(repr(status) for status in OPEN)})"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that waits for its turn: where it lies in the batch's input, in bytes."""

    batch: str
    number: int
    custom_id: str
    place: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One line's answer, a line of JSON, and the tokens that it took."""

    line: Line
    succeeded: bool
    text: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ran: bool = True

    @property
    def kind(self) -> str:
        """Which of a batch's two files it belongs to, a key of `Batch.result_bytes`."""
        return "output" if self.succeeded else "error"


def create(db: sqlite3.Connection, request: BatchRequest) -> Batch:
    """Return a new batch, or the one that was made by the same key of idempotency.

    Raises `NotFoundError` without its input, `InvalidValueError` where the key was used otherwise.
    """
    if request.idempotency is not None:
        made = db.execute(
            "SELECT * FROM batches WHERE owner = ? AND idempotency = ?",
            (request.owner, request.idempotency),
        ).fetchone()
        if made is not None:
            return _the_same(Batch.of(made), request)
    try:
        file = find(db, request.owner, request.input_file)
    except NotFoundError as error:
        raise NotFoundError(error.message, param="input_file_id") from None
    if file.purpose != "batch":
        raise InvalidValueError(
            f"'input_file_id' names a file of purpose {describe(file.purpose)}, not 'batch'.",
            param="input_file_id",
        )
    now, batch_id = int(time.time()), new_id(request.api.value)
    db.execute(
        "INSERT INTO batches VALUES (?, ?, ?, ?, 'validating', ?, ?, ?, ?, '{}', '[]', NULL, NULL, "
        "NULL, ?, ?, 0, 0, 0, 0, 0, 0, 0, 0, 0)",
        (
            *(
                batch_id,
                request.owner,
                request.endpoint,
                request.input_file,
                now,
                now + request.window_s,
            ),
            *(
                request.keep_s,
                json.dumps(request.metadata),
                request.idempotency,
                request.fingerprint,
            ),
        ),
    )
    return reload(db, batch_id)


def _the_same(batch: Batch, request: BatchRequest) -> Batch:
    if batch.fingerprint != request.fingerprint:
        raise InvalidValueError(
            f"The Idempotency-Key {describe(request.idempotency)} made the batch {batch.id}, which "
            "was fingerprint for with another body.",
        )
    return batch


def get(db: sqlite3.Connection, owner: str, batch_id: str, api: Api) -> Batch:
    """Return a batch of an owner. Raises `NotFoundError`, for one of another API as well."""
    row = db.execute(
        f"SELECT * FROM batches WHERE id = ? AND owner = ? AND {_API} = ?",
        (batch_id, owner, api.value),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"There is no batch {describe(batch_id)}.", param="batch_id")
    return Batch.of(row)


def list_page(db: sqlite3.Connection, owner: str, page: Page, api: Api) -> tuple[list[Batch], bool]:
    """Return a page of an owner's batches, and whether there are more. Raises `NotFoundError`."""
    rows, more = paged(db, "batches", owner, page, [(_API, api.value)])
    return [Batch.of(row) for row in rows], more


def unfinished(db: sqlite3.Connection) -> list[Batch]:
    """Return the batches that are to be worked on, the oldest first."""
    rows = db.execute(f"SELECT * FROM batches WHERE {_OPEN} ORDER BY created_at, id")
    return [Batch.of(row) for row in rows]


def reload(db: sqlite3.Connection, batch_id: str) -> Batch:
    """Return a batch whose owner is known to be right."""
    return Batch.of(db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone())


def add_lines(db: sqlite3.Connection, batch_id: str, lines: Iterable[InputLine]) -> list[LineError]:
    """Note lines; returns what is wrong with those whose id another one has."""
    errors = []
    for line in lines:
        added = db.execute(
            "INSERT OR IGNORE INTO lines VALUES (?, ?, ?, ?, ?, ?, 0)",
            (batch_id, line.number, line.custom_id, line.place, line.bytes, line.shared),
        )
        if not added.rowcount:
            errors.append(same_name(line))
    return errors


def forget_lines(db: sqlite3.Connection, batch_id: str) -> None:
    """Forget the lines of a batch: its input is read anew, or it has ended."""
    db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))


def begin(db: sqlite3.Connection, batch_id: str, model: str | None) -> None:
    """Its input is fine: let its lines run, unless it was cancelled meanwhile."""
    (total,) = db.execute("SELECT count(*) FROM lines WHERE batch = ?", (batch_id,)).fetchone()
    db.execute("UPDATE batches SET total = ?, model = ? WHERE id = ?", (total, model, batch_id))
    if reload(db, batch_id).status == "validating":
        move(db, batch_id, "in_progress")


def fail(db: sqlite3.Connection, batch_id: str, errors: Sequence[LineError]) -> None:
    """End a batch whose input is wrong."""
    forget_lines(db, batch_id)
    db.execute("UPDATE batches SET errors = ? WHERE id = ?", (json.dumps(errors), batch_id))
    move(db, batch_id, "failed")


def move(db: sqlite3.Connection, batch_id: str, status: Status) -> None:
    """Enter a state, and note when."""
    moments = reload(db, batch_id).moments | {f"{status}_at": int(time.time())}
    db.execute(
        "UPDATE batches SET status = ?, moments = ? WHERE id = ?",
        (status, json.dumps(moments), batch_id),
    )


def cancel(db: sqlite3.Connection, owner: str, batch_id: str, api: Api) -> Batch:
    """Ask for a batch's end. Raises `NotFoundError`, and `InvalidValueError` after it."""
    batch = get(db, owner, batch_id, api)
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
    """Return lines that wait and are not `busy`, those that begin alike together."""
    marks = ", ".join("?" * len(busy))
    rows = db.execute(
        "SELECT batch, number, custom_id, place, bytes FROM lines WHERE batch = ? AND NOT done "
        f"AND number NOT IN ({marks}) ORDER BY shared, number LIMIT ?",
        (batch_id, *busy, limit),
    )
    return [Line(**dict(row)) for row in rows]


def note_written(db: sqlite3.Connection, answers: Sequence[Answer]) -> None:
    """Count answers that are on the disk."""
    for answer in answers:
        line = answer.line
        kind, count = f"{answer.kind}_bytes", "completed" if answer.succeeded else "failed"
        db.execute(
            "UPDATE lines SET done = 1 WHERE batch = ? AND number = ?", (line.batch, line.number)
        )
        db.execute(
            f"UPDATE batches SET {kind} = {kind} + ?, {count} = {count} + 1, never_run = "
            "never_run + ?, input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
            "output_tokens = output_tokens + ? WHERE id = ?",
            (
                *(len(answer.text), not answer.ran, answer.input_tokens, answer.cached_tokens),
                *(answer.output_tokens, line.batch),
            ),
        )


def end(db: sqlite3.Connection, batch: Batch, status: Status, files: Sequence[StoredFile]) -> None:
    """End a batch: its files have names from now on, its lines are forgotten."""
    for file in files:
        insert(db, file)
        column = "error_file" if file.name.endswith("_error.jsonl") else "output_file"
        db.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (file.id, batch.id))
    forget_lines(db, batch.id)
    move(db, batch.id, status)


def delete(db: sqlite3.Connection, owner: str, batch_id: str, api: Api) -> Batch:
    """Forget a batch that has ended. Raises `NotFoundError`, and `InvalidValueError` before."""
    batch = get(db, owner, batch_id, api)
    if batch.is_open:
        raise InvalidValueError(
            f"The batch {batch.id} has not ended; cancel it first.", param="batch_id"
        )
    db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
    return batch


def counts(db: sqlite3.Connection) -> dict[str, int]:
    """Return how many batches there are by state."""
    return dict(db.execute("SELECT status, count(*) FROM batches GROUP BY status").fetchall())


def lines_to_do(db: sqlite3.Connection) -> int:
    """Return how many lines of open batches wait or run."""
    (count,) = db.execute(
        f"SELECT coalesce(sum(total - completed - failed), 0) FROM batches WHERE {_OPEN}"
    ).fetchone()
    return int(count)


def count_open(db: sqlite3.Connection, owner: str) -> int:
    """Return how many batches of an owner have not ended."""
    (count,) = db.execute(
        f"SELECT count(*) FROM batches WHERE owner = ? AND {_OPEN}", (owner,)
    ).fetchone()
    return int(count)


def forget_old(db: sqlite3.Connection, keep_s: int, now: int) -> None:
    """Forget batches that were made `keep_s` before `now` and have ended."""
    db.execute(
        f"DELETE FROM batches WHERE created_at + ? < ? AND NOT {_OPEN}",
        (max(keep_s, 1), now),
    )
