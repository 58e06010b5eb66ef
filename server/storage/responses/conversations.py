"""Conversations: the turns up to a stored response, with limits on their bytes.

A turn is a row with two JSON arrays, the items of its input and its output, which are joined as
bytes. A request that continues a conversation needs several times its bytes in memory, so the
bytes of all continued conversations are limited together.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from server import bounds
from server.errors import InvalidValueError, OverloadedError, describe
from server.request.record import RequestRecord
from server.storage.raw_json import joined
from server.storage.rows import find_row

MAX_TURNS = 1000
_SMALL_BYTES = 64 << 10
"""Largest conversation that is not counted; the limit on requests bounds these."""
_FIELD = "previous_response_id"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Ids of its turns, the last one first, and the bytes of all items."""

    turns: list[str]
    bytes: int


def find(db: sqlite3.Connection, owner: str, last: str, max_bytes: int) -> Conversation:
    """Return the conversation that ends with the response `last`, without its items.

    Raises `NotFoundError` for a missing turn, and `InvalidValueError` for an unfinished last turn
    and for too many turns or bytes.
    """
    turns: list[str] = []
    size, turn = 0, last
    while turn:
        # SQLite takes lengths from the row header and reads no page of the items.
        columns = "previous, status, length(input) + length(output)"
        row = find_row(db, "responses", owner, turn, _FIELD, columns=columns)
        previous, status, turn_bytes = row
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


def items_of(db: sqlite3.Connection, owner: str, conversation: Conversation) -> bytes:
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
        record.on_end.append(lambda: self._release(size))

    def _release(self, size: int) -> None:
        self._bytes -= size
