"""Tables of responses and their events: queries and changes, each within one transaction."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from server import bounds
from server.errors import OverloadedError
from server.storage.jobs import RESPONSES
from server.storage.quotas import Reservation
from server.storage.raw_json import all_fields_of, object_of, string_of
from server.storage.responses.response import Response
from server.storage.rows import find_row

_MAX_ATTEMPTS = 3
_COLUMNS = [field.name for field in dataclasses.fields(Response)]
_OMITTED = {"request": "NULL AS request", "input": "x'' AS input"}
"""SQL for columns whose megabytes a query does not need."""


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """Background response that waits for its turn."""

    id: str
    owner: str


def insert(db: sqlite3.Connection, response: Response, reservation: Reservation) -> None:
    """Insert a response and end its reservation. Raises `StorageFullError`."""
    reservation.quotas.settle(db, reservation, response.bytes)
    marks = ", ".join("?" * len(_COLUMNS))
    values = [getattr(response, name) for name in _COLUMNS]
    db.execute(f"INSERT INTO responses ({', '.join(_COLUMNS)}) VALUES ({marks})", values)


def queue(db: sqlite3.Connection, response: Response, reservation: Reservation) -> None:
    """Insert a background response. Raises `StorageFullError`, `OverloadedError`."""
    of_owner = RESPONSES.count_open(db, response.owner)
    total = RESPONSES.count_open(db)
    for count, of, most in (
        (of_owner, " of this key", bounds.MAX_BACKGROUND_PER_KEY),
        (total, "", bounds.MAX_BACKGROUND),
    ):
        if count >= most:
            raise OverloadedError(
                f"'background': {count} responses{of} wait or run in the background; at most "
                f"{most} are allowed.",
                rejection="background",
                param="background",
            )
    insert(db, response, reservation)


def get(
    db: sqlite3.Connection, owner: str, response_id: str, *, with_input: bool = False
) -> Response:
    """Return a response of an owner, without its request. Raises `NotFoundError`."""
    omitted = ("request",) if with_input else ("request", "input")
    columns = _columns(omitted)
    row = find_row(db, "responses", owner, response_id, "response_id", columns=columns)
    return Response.of(row)


def begin(db: sqlite3.Connection, response_id: str) -> Response | None:
    """Mark an open response as running and return it; None if it is not open."""
    db.execute(
        "UPDATE responses SET status = 'in_progress', tries = tries + 1 WHERE id = ? AND "
        + RESPONSES.is_open,
        (response_id,),
    )
    # The request contains the items of the input.
    response = _of_id(db, response_id, omitted=("input",))
    return response if response is not None and response.is_open else None


def add_events(
    db: sqlite3.Connection, response_id: str, begin_at: int, frames: Sequence[str]
) -> None:
    """Store events by their numbers; stored ones are skipped."""
    size = 0
    for number, frame in enumerate(frames, begin_at):
        added = db.execute(
            "INSERT OR IGNORE INTO response_events VALUES (?, ?, ?)", (response_id, number, frame)
        )
        size += len(frame.encode()) * added.rowcount
    db.execute("UPDATE responses SET bytes = bytes + ? WHERE id = ?", (size, response_id))


def events(db: sqlite3.Connection, response_id: str, after: int) -> list[str]:
    """Return the events after the number `after`."""
    rows = db.execute(
        "SELECT frame FROM response_events WHERE response = ? AND number > ? ORDER BY number",
        (response_id, after),
    )
    return [row[0] for row in rows]


def end(db: sqlite3.Connection, response_id: str, changes: Mapping[str, Any]) -> Response | None:
    """End a response if it is open, and return it; None if it was deleted.

    `changes` are its `status` and changed fields; values of type `Raw` are JSON texts.
    """
    response = _of_id(db, response_id, omitted=("input",))
    if response is not None and response.is_open:
        fields = {**all_fields_of(response.answer), **changes}
        status, output = fields.pop("status"), bytes(fields.pop("output", response.output))
        answer = object_of(fields)
        db.execute(
            "UPDATE responses SET status = ?, answer = ?, output = ?, request = NULL, "
            "bytes = bytes + ? WHERE id = ?",
            (
                *(status if isinstance(status, str) else string_of(bytes(status)), answer, output),
                *(len(answer) + len(output) - response.unfinished_bytes, response_id),
            ),
        )
    return _of_id(db, response_id, omitted=("input", "request"))


def delete(db: sqlite3.Connection, owner: str, response_id: str) -> None:
    """Delete a response. Raises `NotFoundError`."""
    get(db, owner, response_id)
    _delete(db, [response_id])


def unfinished(db: sqlite3.Connection) -> list[Waiting]:
    """Return the responses to run after a start, the oldest first; end the others as failed.

    Responses with stored events cannot run again, since a client may have read the events.
    """
    rows = db.execute(
        "SELECT id, owner, tries, EXISTS (SELECT 1 FROM response_events WHERE response = id) "
        f"FROM responses WHERE {RESPONSES.is_open} ORDER BY created_at, rowid"
    ).fetchall()
    waiting = []
    for identity, owner, tries, has_events in rows:
        if has_events:
            end(db, identity, failure("The server ended while this response was streamed."))
        elif tries >= _MAX_ATTEMPTS:
            end(
                db,
                identity,
                failure(f"The server ended {_MAX_ATTEMPTS} times during this response."),
            )
        else:
            waiting.append(Waiting(identity, owner))
    return waiting


def failure(message: str) -> dict[str, Any]:
    """Return the changes of a failed response."""
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def delete_expired(db: sqlite3.Connection, now: int) -> int:
    """Delete expired, ended responses that no other one continues; return their number."""
    rows = db.execute(
        f"SELECT id FROM responses WHERE expires_at <= ? AND NOT {RESPONSES.is_open} AND id NOT IN "
        "(SELECT previous FROM responses WHERE previous IS NOT NULL)",
        (now,),
    ).fetchall()
    _delete(db, [row[0] for row in rows])
    return len(rows)


def _delete(db: sqlite3.Connection, ids: Sequence[str]) -> None:
    for response_id in ids:
        db.execute("DELETE FROM response_events WHERE response = ?", (response_id,))
        db.execute("DELETE FROM responses WHERE id = ?", (response_id,))


def _columns(omitted: Sequence[str]) -> str:
    return ", ".join(_OMITTED[name] if name in omitted else name for name in _COLUMNS)


def _of_id(db: sqlite3.Connection, response_id: str, omitted: Sequence[str]) -> Response | None:
    """Return a response by its id alone, None if it was deleted."""
    row = db.execute(
        f"SELECT {_columns(omitted)} FROM responses WHERE id = ?", (response_id,)
    ).fetchone()
    return None if row is None else Response.of(row)
