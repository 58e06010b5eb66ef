"""Responses and their events in the database: every change of a state, as one transaction."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections.abc import Sequence

from pydantic_core import from_json, to_json

from server.errors import InvalidValueError, NotFoundError, StorageFullError, describe
from server.frontend import JsonObject
from server.responses.response import OPEN, Response
from server.storage.database import stored_bytes

MAX_TURNS = 1000
"""Of a conversation."""
_TRIES = 3
_OPEN = f"status IN ({', '.join(repr(status) for status in OPEN)})"
_COLUMNS = [field.name for field in dataclasses.fields(Response)]
_PREVIOUS = "previous_response_id"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How many responses an owner may have, and how many bytes all that is stored."""

    per_owner: int
    stored_bytes: int


def require_room(db: sqlite3.Connection, owner: str, limits: Limits) -> None:
    """Raise `StorageFullError` where an owner may have no more."""
    (count,) = db.execute("SELECT count(*) FROM responses WHERE owner = ?", (owner,)).fetchone()
    if count >= limits.per_owner:
        raise StorageFullError(
            f"There are {count} responses of this key, and at most {limits.per_owner} may be "
            "(--max-responses-per-key); delete some, or send 'store': false."
        )
    stored = stored_bytes(db)
    if stored >= limits.stored_bytes:
        raise StorageFullError(
            f"All that is stored may have {limits.stored_bytes} bytes (--max-stored-bytes), and "
            f"{stored} are taken; delete some, or send 'store': false."
        )


def insert(db: sqlite3.Connection, response: Response) -> None:
    """Keep a new one."""
    marks = ", ".join("?" * len(_COLUMNS))
    values = [getattr(response, name) for name in _COLUMNS]
    db.execute(f"INSERT INTO responses ({', '.join(_COLUMNS)}) VALUES ({marks})", values)


def get(
    db: sqlite3.Connection, owner: str, response_id: str, param: str = "response_id"
) -> Response:
    """Return a response of an owner. Raises `NotFoundError`."""
    row = db.execute(
        "SELECT * FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"There is no response {describe(response_id)}.", param=param)
    return Response.of(row)


def conversation(db: sqlite3.Connection, owner: str, last: str) -> bytes:
    """Return the items of all turns up to the response `last`: a JSON array.

    Raises `NotFoundError` where one of them is gone, `InvalidValueError` where the last has no
    answer, or there are too many.
    """
    turns: list[Response] = []
    wanted: str | None = last
    while wanted is not None:
        response = get(db, owner, wanted, _PREVIOUS)
        if not turns and response.status not in ("completed", "incomplete"):
            raise InvalidValueError(
                f"The response {describe(last)} is {response.status} and cannot be continued.",
                param=_PREVIOUS,
            )
        turns.append(response)
        if len(turns) > MAX_TURNS:
            raise InvalidValueError(
                f"The conversation has more than {MAX_TURNS} turns.", param=_PREVIOUS
            )
        wanted = response.previous
    items = []
    for turn in reversed(turns):
        items += from_json(turn.input)
        items += from_json(turn.answer)["output"]
    return to_json(items)


def begin(db: sqlite3.Connection, response_id: str) -> None:
    """It is being made, once more."""
    db.execute(
        "UPDATE responses SET status = 'in_progress', tries = tries + 1 WHERE id = ? AND " + _OPEN,
        (response_id,),
    )


def add_events(
    db: sqlite3.Connection, response_id: str, begin_at: int, frames: Sequence[str]
) -> None:
    """Keep events by their numbers; for one that is there already, nothing."""
    db.executemany(
        "INSERT OR IGNORE INTO response_events VALUES (?, ?, ?)",
        [(response_id, begin_at + place, frame) for place, frame in enumerate(frames)],
    )


def events(db: sqlite3.Connection, response_id: str, after: int) -> list[str]:
    """Return the events behind the number `after`."""
    rows = db.execute(
        "SELECT frame FROM response_events WHERE response = ? AND number > ? ORDER BY number",
        (response_id, after),
    )
    return [row[0] for row in rows]


def end(db: sqlite3.Connection, response_id: str, changes: JsonObject) -> Response | None:
    """End one that is open: `changes` of its answer have its `status`. None where it is gone."""
    row = db.execute("SELECT * FROM responses WHERE id = ?", (response_id,)).fetchone()
    if row is None:
        return None
    response = Response.of(row)
    if response.is_open:
        answer = to_json(from_json(response.answer) | changes)
        db.execute(
            "UPDATE responses SET status = ?, answer = ?, request = NULL, bytes = ? WHERE id = ?",
            (changes["status"], answer, len(response.input) + len(answer), response_id),
        )
    return Response.of(
        db.execute("SELECT * FROM responses WHERE id = ?", (response_id,)).fetchone()
    )


def delete(db: sqlite3.Connection, owner: str, response_id: str) -> None:
    """Forget a response. Raises `NotFoundError`."""
    get(db, owner, response_id)
    _forget(db, [response_id])


def unfinished(db: sqlite3.Connection) -> list[Response]:
    """Return what is to be made after a start, the oldest first; end what cannot be.

    Events that somebody has seen cannot be made again.
    """
    rows = db.execute(f"SELECT * FROM responses WHERE {_OPEN} ORDER BY created_at, id").fetchall()
    again = []
    for response in map(Response.of, rows):
        if events(db, response.id, -1):
            end(db, response.id, failure("The server ended while this was streamed."))
        elif response.tries >= _TRIES:
            end(db, response.id, failure(f"The server ended {_TRIES} times while this was made."))
        else:
            again.append(response)
    return again


def failure(message: str) -> JsonObject:
    """What an answer says that could not be made."""
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def counts(db: sqlite3.Connection) -> dict[str, int]:
    """Return how many responses there are by state."""
    return dict(db.execute("SELECT status, count(*) FROM responses GROUP BY status").fetchall())


def expire(db: sqlite3.Connection) -> int:
    """Forget what has expired and what nobody has continued since; returns how many."""
    rows = db.execute(
        f"SELECT id FROM responses WHERE expires_at <= ? AND NOT {_OPEN} AND id NOT IN "
        "(SELECT previous FROM responses WHERE previous IS NOT NULL)",
        (int(time.time()),),
    ).fetchall()
    _forget(db, [row[0] for row in rows])
    return len(rows)


def _forget(db: sqlite3.Connection, ids: Sequence[str]) -> None:
    for response_id in ids:
        db.execute("DELETE FROM response_events WHERE response = ?", (response_id,))
        db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
