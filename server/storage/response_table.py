"""Stored responses: their row, their form in OpenAI's API, and queries of the tables.

A conversation is all turns up to a response. A turn is a row with two JSON arrays, the items of its
input and its output, which are joined as bytes. A request that continues a conversation needs
several times its bytes in memory, so the bytes of all continued conversations are limited together.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Raw
from pydantic_core import from_json, to_json

from server import bounds
from server.errors import (
    InvalidTypeError,
    InvalidValueError,
    NotFoundError,
    OverloadedError,
    describe,
)
from server.request.options import Tier
from server.request.record import RequestRecord
from server.storage.database import RESPONSES, Page, Reservation, T, find_row, new_id
from server.storage.raw_json import (
    JsonText,
    decode,
    get_all_fields,
    get_fields,
    get_string,
    joined,
    make_object,
    with_fields,
)
from server.wire import Endpoint, JsonObject

_INPUT = "input"
_FIELD = "previous_response_id"


@dataclass(slots=True, kw_only=True)
class StorageOptions:
    """Storage fields of a request of the Responses API.

    `store` is None where the request has no such field. `previous` is the id of the response that
    it continues; `items` is a JSON array with the items of its own input. `is_stored` says whether
    the response will be stored, within `reservation`.
    """

    store: bool | None
    background: bool
    previous: str | None
    stream: bool
    items: bytes
    is_stored: bool = False
    reservation: Reservation | None = None


def take_storage_options(
    endpoint: Endpoint, body: JsonObject, before: bytes | None
) -> StorageOptions:
    """Remove the storage fields from a body of the Responses API and return them.

    `before` is a JSON array with the items of the conversation that the request continues; they
    are inserted before its own. Raises `InvalidTypeError`, `InvalidValueError`.
    """
    stores = endpoint is Endpoint.RESPONSES
    options = StorageOptions(
        store=_pop(body, "store", bool) if stores else False,
        background=stores and (_pop(body, "background", bool) or False),
        previous=_pop(body, _FIELD, str),
        stream=body.get("stream") is True,
        items=to_json(_items(body.get(_INPUT))),
    )
    if options.background and options.store is False:
        raise InvalidValueError("'background': true requires 'store': true.", param="background")
    if options.previous is not None and body.get("previous_input_messages"):
        raise InvalidValueError(
            f"'{_FIELD}' and 'previous_input_messages' exclude each other.", param=_FIELD
        )
    if before is not None:
        body[_INPUT] = from_json(before) + _items(body.get(_INPUT))
    return options


def _items(given: object) -> list[Any]:
    """Return the items of an input; none for an invalid type, which is rejected later."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given if isinstance(given, list) else []


def _pop(body: JsonObject, name: str, kind: type[T]) -> T | None:
    value = body.pop(name, None)
    if value is not None and not isinstance(value, kind):
        what = "a boolean" if kind is bool else "a string"
        raise InvalidTypeError(f"'{name}' must be {what}, got {describe(value)}.", param=name)
    return value


@dataclass(frozen=True, slots=True)
class Response:
    """Row of the table of responses.

    `input` and `output` are JSON arrays of items. `answer` is the response object without its
    output and status. `request` is the body of an open background response, which runs in `tier`.
    `streams` says whether its events are stored. Columns that a query omits are empty.
    """

    id: str
    owner: str
    previous: str | None
    status: str
    created_at: int
    expires_at: int | None
    input: JsonText
    answer: JsonText
    output: JsonText
    bytes: int
    background: bool = False
    streams: bool = False
    tier: str = Tier.DEFAULT.value
    tries: int = 0
    request: JsonText | None = None

    @classmethod
    def of(cls, row: sqlite3.Row) -> Response:
        values = dict(row)
        for name in ("background", "streams"):
            values[name] = bool(values[name])
        return cls(**values)

    @property
    def is_open(self) -> bool:
        return self.status in RESPONSES.open_statuses

    @property
    def unfinished_bytes(self) -> int:
        """Share of `bytes` that the final answer replaces."""
        return len(self.request or b"") + len(self.answer) + len(self.output)

    def shown(self) -> JsonText:
        return with_fields(self.answer, {"status": self.status, "output": Raw(self.output)})


def finished_response(
    owner: str, previous: str | None, items: bytes, whole: bytes, keep_s: int
) -> Response:
    """Return the row for the JSON text `whole` of a finished response."""
    fields = get_all_fields(whole)
    status, output = get_string(bytes(fields.pop("status"))), bytes(fields.pop("output"))
    identity, answer = get_string(bytes(fields["id"])), make_object(fields)
    assert status is not None
    assert identity is not None
    now = int(time.time())
    return Response(
        id=identity,
        owner=owner,
        previous=previous,
        status=status,
        created_at=now,
        expires_at=now + keep_s if keep_s else None,
        input=items,
        answer=answer,
        output=output,
        bytes=len(items) + len(answer) + len(output),
    )


def queued_response(
    owner: str, options: StorageOptions, raw: bytes, tier: Tier, *, shown: JsonObject, keep_s: int
) -> Response:
    """Return the row of a background response for the body `raw`.

    `shown` has the request fields that it shows, and the default model.
    """
    identity, now = new_id("resp_"), int(time.time())
    model = get_string(get_fields(raw, "model").get("model"))
    answer = to_json(
        {
            "id": identity,
            "object": "response",
            "created_at": now,
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
            **shown,
            "model": model or shown["model"],
            "background": True,
            "store": True,
        }
    )
    # The request runs in the foreground and unstored; the runner stores its result in this row.
    request = with_fields(raw, {"background": False, "store": False})
    return Response(
        id=identity,
        owner=owner,
        previous=options.previous,
        status="queued",
        created_at=now,
        expires_at=now + keep_s if keep_s else None,
        input=options.items,
        answer=answer,
        output=b"[]",
        bytes=len(request) + len(options.items) + len(answer) + len(b"[]"),
        background=True,
        streams=options.stream,
        tier=tier.value,
        request=request,
    )


_AS_SENT: JsonObject = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "user")),
    **dict.fromkeys(("previous_response_id", "prompt_cache_key", "safety_identifier")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
    "background": False,
}
"""Default values of fields; a null also means the default."""
_SAMPLING: JsonObject = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_REASONING: JsonObject = {"effort": None, "summary": None}
_FUNCTION: JsonObject = {"description": None, "parameters": None, "strict": None}
_SCHEMA_FORMAT: JsonObject = {"description": None, "strict": False}


def shown_request(body: JsonObject, sampling: JsonObject) -> JsonObject:
    """Return a copy of the request fields that a response repeats.

    `sampling` has the default sampling parameters of the model. Invalid values are copied as well,
    since a later check rejects the request. Raises `InvalidTypeError` for a `safety_identifier`
    that is no string, which no other code checks.
    """
    label = body.get("safety_identifier")
    if label is not None and not isinstance(label, str):
        raise InvalidTypeError(
            f"'safety_identifier' must be a string, got {describe(label)}.",
            param="safety_identifier",
        )
    defaults = _AS_SENT | _SAMPLING | {k: v for k, v in sampling.items() if k in _SAMPLING}
    shown = defaults | {k: body[k] for k in defaults if body.get(k) is not None}
    shown["reasoning"] = {**_REASONING, **_object(body.get("reasoning"))}
    text = _object(body.get("text"))
    form = _object(text.get("format")) or {"type": "text"}
    if form.get("type") == "json_schema":
        form = {**_SCHEMA_FORMAT, **{k: v for k, v in form.items() if v is not None}}
    shown["text"] = {**text, "format": form}
    tools = body.get("tools")
    shown["tools"] = [
        {**_FUNCTION, **tool} if _object(tool).get("type") == "function" else tool
        for tool in (tools if isinstance(tools, list) else ())
    ]
    copied: JsonObject = from_json(to_json(shown))
    return copied


def _object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


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
    for owner, of, most in (
        (response.owner, " of this key", bounds.MAX_BACKGROUND_PER_KEY),
        (None, "", bounds.MAX_BACKGROUND),
    ):
        if (count := RESPONSES.count_open(db, owner)) >= most:
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
        fields = {**get_all_fields(response.answer), **changes}
        status, output = fields.pop("status"), bytes(fields.pop("output", response.output))
        answer = make_object(fields)
        text = status if isinstance(status, str) else get_string(bytes(status))
        more_bytes = len(answer) + len(output) - response.unfinished_bytes
        db.execute(
            "UPDATE responses SET status = ?, answer = ?, output = ?, request = NULL, "
            "bytes = bytes + ? WHERE id = ?",
            (text, answer, output, more_bytes, response_id),
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
            message = f"The server ended {_MAX_ATTEMPTS} times during this response."
            end(db, identity, failure(message))
        else:
            waiting.append(Waiting(identity, owner))
    return waiting


def failure(message: str) -> dict[str, Any]:
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


MAX_TURNS = 1000
_SMALL_BYTES = 64 << 10
"""Largest conversation that is not counted; the limit on requests bounds these."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Ids of its turns, the last one first, and the bytes of all items."""

    turns: list[str]
    bytes: int


def find_conversation(
    db: sqlite3.Connection, owner: str, last: str, max_bytes: int
) -> Conversation:
    """Return the conversation that ends with the response `last`, without its items.

    Raises `NotFoundError` for a missing turn, and `InvalidValueError` for an unfinished last turn
    and for too many turns or bytes.
    """
    turns: list[str] = []
    size, turn = 0, last
    while turn:
        # SQLite takes lengths from the row header and reads no page of the items.
        columns = "previous, status, length(input) + length(output)"
        previous, status, turn_bytes = find_row(
            db, "responses", owner, turn, _FIELD, columns=columns
        )
        if not turns and status not in ("completed", "incomplete"):
            raise InvalidValueError(
                f"The response {describe(last)} is {status} and cannot be continued.", param=_FIELD
            )
        turns.append(turn)
        if len(turns) > MAX_TURNS:
            raise InvalidValueError(
                f"The conversation has more than {MAX_TURNS} turns.", param=_FIELD
            )
        size += turn_bytes
        turn = previous
    if size > max_bytes:
        raise InvalidValueError(
            f"'{_FIELD}': the {len(turns)} turns up to {describe(last)} have {size} bytes; at most "
            f"{max_bytes} are allowed.",
            param=_FIELD,
        )
    return Conversation(turns, size)


def conversation_items(db: sqlite3.Connection, owner: str, conversation: Conversation) -> bytes:
    """Return the items of a conversation as a JSON array. Raises `NotFoundError`."""
    arrays: list[bytes] = []
    for turn in reversed(conversation.turns):
        arrays += find_row(db, "responses", owner, turn, _FIELD, columns="input, output")
    return joined(arrays)


class ContinuedBytes:
    """Sum of the bytes of continued conversations. Used from the event loop."""

    def __init__(self) -> None:
        self._bytes = 0

    def hold(self, size: int, record: RequestRecord) -> None:
        """Add a conversation until the request of `record` ends. Raises `OverloadedError`."""
        if size <= _SMALL_BYTES:
            return
        if self._bytes + size > bounds.MAX_CONTINUED_BYTES:
            raise OverloadedError(
                f"'{_FIELD}': the conversation has {size} bytes and those that requests continue "
                f"now have {self._bytes}; at most {bounds.MAX_CONTINUED_BYTES} are allowed "
                "together.",
                rejection="conversations",
                param=_FIELD,
            )
        self._bytes += size

        def release() -> None:
            self._bytes -= size

        record.on_end.append(release)


_MESSAGE = "message"


def page_of_items(response: Response, page: Page) -> tuple[list[dict[str, Any]], bool]:
    """Return a page of the input items, and whether more follow. Raises `NotFoundError`."""
    items = [bytes(item) for item in decode(response.input, list[Raw])]
    numbers = list(range(len(items)))
    if page.newest_first:
        numbers.reverse()
    if page.after is not None:
        ids = [_make_id(response.id, number, items[number]) for number in numbers]
        if page.after not in ids:
            raise NotFoundError(
                f"'after' is {describe(page.after)}, which is not there.", param="after"
            )
        numbers = numbers[ids.index(page.after) + 1 :]
    shown = [_shown(response.id, number, items[number]) for number in numbers[: page.limit]]
    return shown, len(numbers) > page.limit


def _make_id(response_id: str, number: int, item: bytes) -> str:
    """Return the id of an item; items without one get an id from their number."""
    if item[:1] != b"{":
        return f"msg_{number}"
    fields = get_fields(item, "id", "type")
    if given := get_string(fields.get("id")):
        return given
    prefix = "msg" if _kind(fields.get("type")) == _MESSAGE else "item"
    return f"{prefix}_{response_id.removeprefix('resp_')}_{number}"


def _kind(value: bytes | Raw | None) -> str:
    return get_string(None if value is None else bytes(value)) or _MESSAGE


def _shown(response_id: str, number: int, item: bytes) -> dict[str, Any]:
    identity = _make_id(response_id, number, item)
    if item[:1] != b"{":
        return {"type": _MESSAGE, "id": identity, "content": Raw(item)}
    fields: dict[str, Any] = dict(get_all_fields(item))
    kind = _kind(fields.get("type"))
    shown = {"type": kind, **fields, "id": identity}
    if not get_string(bytes(fields.get("type", b"null"))):
        shown["type"] = kind
    if kind == _MESSAGE:
        shown.setdefault("status", "completed")
        content = fields.get("content")
        if content is not None and bytes(content)[:1] == b'"':
            if get_string(bytes(fields.get("role", b"null"))) == "assistant":
                shown["content"] = [{"type": "output_text", "text": content, "annotations": []}]
            else:
                shown["content"] = [{"type": "input_text", "text": content}]
    return shown
