"""A stored response: what was asked, what was answered, and how OpenAI's API shows both."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from msgspec import Raw
from pydantic_core import to_json

from server.frontend import JsonObject, StorageOptions
from server.storage.files import new_id
from server.storage.raw_json import (
    JsonText,
    all_fields_of,
    fields_of,
    object_of,
    string_of,
    with_fields,
)
from server.tiers.tier import Tier

OPEN = ("queued", "in_progress")
"""The states of a response that is still to be made."""
ENDED = ("completed", "incomplete", "failed", "cancelled")
STATUSES = (*OPEN, *ENDED)
_NO_ITEMS = b"[]"


@dataclass(frozen=True, slots=True)
class Response:
    """One response as the database has it.

    `input` and `output` are JSON arrays of items: the request's own and the answer's. `answer` is
    the rest of the response as it is shown, but for its status. `request` is the body of one that
    is still to be made, in `tier`; `streams` says that its events are kept. Columns that a query
    leaves out are empty.
    """

    id: str
    owner: str
    previous: str | None
    status: str
    created_at: int
    expires_at: int | None
    background: bool
    streams: bool
    tier: str
    tries: int
    request: JsonText | None
    input: JsonText
    answer: JsonText
    output: JsonText
    bytes: int

    @classmethod
    def of(cls, row: sqlite3.Row) -> Response:
        """The response of a row."""
        values = dict(row)
        for name in ("background", "streams"):
            values[name] = bool(values[name])
        return cls(**values)

    @property
    def is_open(self) -> bool:
        """Whether it is still to be made."""
        return self.status in OPEN

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of `bytes` that are replaced when the answer is complete."""
        return len(self.request or b"") + len(self.answer) + len(self.output)

    def shown(self) -> JsonText:
        """Return the JSON text that a client gets."""
        return with_fields(self.answer, {"status": self.status, "output": Raw(self.output)})


def made(owner: str, previous: str | None, items: bytes, whole: bytes, keep_s: int) -> Response:
    """Return the response whose JSON text, as it was shown, is `whole`."""
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
        background=False,
        streams=False,
        tier=Tier.DEFAULT.value,
        tries=0,
        request=None,
        input=items,
        answer=answer,
        bytes=len(items) + len(answer) + len(output),
        output=output,
    )


def queued(
    owner: str, options: StorageOptions, raw: bytes, tier: Tier, *, shown: JsonObject, keep_s: int
) -> Response:
    """Return the response that the body `raw` asks to be made meanwhile.

    `shown` is what it shows of the request, and the model that answers if that names none.
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
    # The request that is run later; its response is stored here, not by itself.
    request = with_fields(raw, {"background": False, "store": False})
    return Response(
        id=identity,
        owner=owner,
        previous=options.previous,
        status="queued",
        created_at=now,
        expires_at=now + keep_s if keep_s else None,
        background=True,
        streams=options.stream,
        tier=tier.value,
        tries=0,
        request=request,
        input=options.items,
        answer=answer,
        bytes=len(request) + len(options.items) + len(answer) + len(_NO_ITEMS),
        output=_NO_ITEMS,
    )
