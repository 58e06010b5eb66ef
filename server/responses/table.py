"""Responses and their events in the database: every change of a state, as one transaction."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import NotFoundError, OverloadedError, describe
from server.responses.response import OPEN, Response
from server.storage.quotas import Reservation
from server.storage.raw_json import all_fields_of, object_of, string_of

_TRIES = 3
_OPEN = f"status IN ({', '.join(repr(status) for status in OPEN)})"
_COLUMNS = [field.name for field in dataclasses.fields(Response)]
_UNREAD = {"request": "NULL AS request", "input": "x'' AS input"}
"""Columns as queries have them that need none of their megabytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class BackgroundLimits:
    """Most responses that wait or run in the background, of one owner and of all."""

    per_owner: int
    total: int


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A response in the background that waits for its turn."""

    id: str
    owner: str


def insert(db: sqlite3.Connection, response: Response, reservation: Reservation) -> None:
    """Store a new response in the place that is reserved for it. Raises `StorageFullError`."""
    reservation.quotas.settle(db, reservation, response.bytes)
    marks = ", ".join("?" * len(_COLUMNS))
    values = [getattr(response, name) for name in _COLUMNS]
    db.execute(f"INSERT INTO responses ({', '.join(_COLUMNS)}) VALUES ({marks})", values)


def queue(
    db: sqlite3.Connection, response: Response, reservation: Reservation, limits: BackgroundLimits
) -> None:
    """Store a response that is still to be made. Raises `StorageFullError`, `OverloadedError`."""
    (of_owner,) = db.execute(
        f"SELECT count(*) FROM responses WHERE owner = ? AND {_OPEN}", (response.owner,)
    ).fetchone()
    (total,) = db.execute(f"SELECT count(*) FROM responses WHERE {_OPEN}").fetchone()
    for count, of, most, flag in (
        (of_owner, " of this key", limits.per_owner, "--max-background-per-key"),
        (total, "", limits.total, "--max-background"),
    ):
        if count >= most:
            raise OverloadedError(
                f"'background': {count} responses{of} wait or run in the background; at most "
                f"{most} are allowed ({flag}).",
                rejection="background",
                param="background",
            )
    insert(db, response, reservation)


def get(
    db: sqlite3.Connection, owner: str, response_id: str, *, with_input: bool = False
) -> Response:
    """Return a response of an owner, its input only on demand. Raises `NotFoundError`."""
    unread = ("request",) if with_input else ("request", "input")
    row = db.execute(
        f"SELECT {_columns(unread)} FROM responses WHERE id = ? AND owner = ?",
        (response_id, owner),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"There is no response {describe(response_id)}.", param="response_id")
    return Response.of(row)


def begin(db: sqlite3.Connection, response_id: str) -> Response | None:
    """Note that a response is being made, and return it; None where it is no longer open."""
    db.execute(
        "UPDATE responses SET status = 'in_progress', tries = tries + 1 WHERE id = ? AND " + _OPEN,
        (response_id,),
    )
    # Its items are in the request as well.
    response = _of_id(db, response_id, unread=("input",))
    return response if response is not None and response.is_open else None


def add_events(
    db: sqlite3.Connection, response_id: str, begin_at: int, frames: Sequence[str]
) -> None:
    """Keep events by their numbers; for one that is there already, nothing."""
    size = 0
    for number, frame in enumerate(frames, begin_at):
        added = db.execute(
            "INSERT OR IGNORE INTO response_events VALUES (?, ?, ?)", (response_id, number, frame)
        )
        size += len(frame.encode()) * added.rowcount
    db.execute("UPDATE responses SET bytes = bytes + ? WHERE id = ?", (size, response_id))


def events(db: sqlite3.Connection, response_id: str, after: int) -> list[str]:
    """Return the events behind the number `after`."""
    rows = db.execute(
        "SELECT frame FROM response_events WHERE response = ? AND number > ? ORDER BY number",
        (response_id, after),
    )
    return [row[0] for row in rows]


def end(db: sqlite3.Connection, response_id: str, changes: Mapping[str, Any]) -> Response | None:
    """End a response that is open; None where it is gone.

    `changes` are fields of its answer, with its `status`; values of type `Raw` are JSON texts.
    """
    response = _of_id(db, response_id, unread=("input",))
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
    return _of_id(db, response_id, unread=("input", "request"))


def delete(db: sqlite3.Connection, owner: str, response_id: str) -> None:
    """Forget a response. Raises `NotFoundError`."""
    get(db, owner, response_id)
    _forget(db, [response_id])


def unfinished(db: sqlite3.Connection) -> list[Waiting]:
    """Return the responses to make after a start, the oldest first; end those that cannot be.

    Events that a client may have seen cannot be made again.
    """
    rows = db.execute(
        "SELECT id, owner, tries, EXISTS (SELECT 1 FROM response_events WHERE response = id) "
        f"FROM responses WHERE {_OPEN} ORDER BY created_at, rowid"
    ).fetchall()
    again = []
    for identity, owner, tries, was_seen in rows:
        if was_seen:
            end(db, identity, failure("The server ended while this was streamed."))
        elif tries >= _TRIES:
            end(db, identity, failure(f"The server ended {_TRIES} times while this was made."))
        else:
            again.append(Waiting(identity, owner))
    return again


def failure(message: str) -> dict[str, Any]:
    """Return the changes of an answer that could not be made."""
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def counts(db: sqlite3.Connection) -> dict[str, int]:
    """Return how many responses there are by state."""
    return dict(db.execute("SELECT status, count(*) FROM responses GROUP BY status").fetchall())


def expire(db: sqlite3.Connection, now: int) -> int:
    """Forget what has expired by `now` and is not continued; returns how many."""
    rows = db.execute(
        f"SELECT id FROM responses WHERE expires_at <= ? AND NOT {_OPEN} AND id NOT IN "
        "(SELECT previous FROM responses WHERE previous IS NOT NULL)",
        (now,),
    ).fetchall()
    _forget(db, [row[0] for row in rows])
    return len(rows)


def _forget(db: sqlite3.Connection, ids: Sequence[str]) -> None:
    for response_id in ids:
        db.execute("DELETE FROM response_events WHERE response = ?", (response_id,))
        db.execute("DELETE FROM responses WHERE id = ?", (response_id,))


def _columns(unread: Sequence[str]) -> str:
    return ", ".join(_UNREAD[name] if name in unread else name for name in _COLUMNS)


def _of_id(db: sqlite3.Connection, response_id: str, unread: Sequence[str]) -> Response | None:
    """Return a response whose owner is known to be right, None where it is gone."""
    row = db.execute(
        f"SELECT {_columns(unread)} FROM responses WHERE id = ?", (response_id,)
    ).fetchone()
    return None if row is None else Response.of(row)
