"""Stored response: its database row and its form in OpenAI's API."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from msgspec import Raw
from pydantic_core import to_json

from server.request.options import Tier
from server.storage.jobs import RESPONSES
from server.storage.raw_json import (
    JsonText,
    all_fields_of,
    fields_of,
    object_of,
    string_of,
    with_fields,
)
from server.storage.responses.storage_options import StorageOptions
from server.storage.rows import new_id
from server.wire.endpoint import JsonObject

_NO_ITEMS = b"[]"


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
        """Return the response of a row."""
        values = dict(row)
        for name in ("background", "streams"):
            values[name] = bool(values[name])
        return cls(**values)

    @property
    def is_open(self) -> bool:
        """True until the response has ended."""
        return self.status in RESPONSES.open_statuses

    @property
    def unfinished_bytes(self) -> int:
        """Share of `bytes` that the final answer replaces."""
        return len(self.request or b"") + len(self.answer) + len(self.output)

    def shown(self) -> JsonText:
        """Return the JSON text of the response object."""
        return with_fields(self.answer, {"status": self.status, "output": Raw(self.output)})


def finished_response(
    owner: str, previous: str | None, items: bytes, whole: bytes, keep_s: int
) -> Response:
    """Return the row for the JSON text `whole` of a finished response."""
    fields = all_fields_of(whole)
    status, output = string_of(bytes(fields.pop("status"))), bytes(fields.pop("output"))
    identity, answer = string_of(bytes(fields["id"])), object_of(fields)
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
    model = string_of(fields_of(raw, "model").get("model"))
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
        output=_NO_ITEMS,
        bytes=len(request) + len(options.items) + len(answer) + len(_NO_ITEMS),
        background=True,
        streams=options.stream,
        tier=tier.value,
        request=request,
    )
