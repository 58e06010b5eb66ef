"""A stored response: what was asked, what was answered, and how OpenAI's API shows both."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from server.frontend import JsonObject
from server.storage.files import new_id
from server.tiers.tier import Tier

OPEN = ("queued", "in_progress")
"""The states of a response that is still to be made."""
ENDED = ("completed", "incomplete", "failed", "cancelled")
STATUSES = (*OPEN, *ENDED)


@dataclass(frozen=True, slots=True)
class Response:
    """One response as the database has it.

    `input` is a JSON array, the request's own items; `answer` the response as it is shown, but for
    its status. `request` is the body of one that is still to be made, in `tier`; `streams` says
    that its events are kept.
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
    request: bytes | None
    input: bytes
    answer: bytes
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
        return len(self.request or b"") + len(self.answer)

    def shown(self) -> JsonObject:
        """Return it as a client sees it."""
        answer: JsonObject = from_json(self.answer)
        return answer | {"status": self.status}

    def items(self) -> list[JsonObject]:
        """Return the input's items as a client sees them, each with an id."""
        items = enumerate(from_json(self.input))
        return [_shown_item(self.id, number, item) for number, item in items]


def made(
    owner: str, previous: str | None, items: bytes, answer: JsonObject, keep_s: int
) -> Response:
    """The response of an `answer` that is complete."""
    text = to_json(answer)
    now = int(time.time())
    return Response(
        id=answer["id"],
        owner=owner,
        previous=previous,
        status=answer["status"],
        created_at=now,
        expires_at=now + keep_s if keep_s else None,
        background=False,
        streams=False,
        tier=Tier.DEFAULT.value,
        tries=0,
        request=None,
        input=items,
        answer=text,
        bytes=len(items) + len(text),
    )


def queued(
    owner: str,
    previous: str | None,
    items: bytes,
    raw: bytes,
    tier: Tier,
    *,
    shown: JsonObject,
    keep_s: int,
) -> Response:
    """Return the response that the body `raw` asks to be made meanwhile.

    `shown` is what it shows of the request, and the model that answers if that names none.
    """
    body: JsonObject = from_json(raw)
    identity, now = new_id("resp_"), int(time.time())
    streams = body.get("stream") is True
    answer: JsonObject = {
        "id": identity,
        "object": "response",
        "created_at": now,
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
        "output": [],
        **shown,
        "model": body.get("model") or shown["model"],
        "background": True,
        "store": True,
    }
    # The request that is run later; its response is stored here, not by itself.
    body |= {"background": False, "store": False, "request_id": identity}
    request, text = to_json(body), to_json(answer)
    return Response(
        id=identity,
        owner=owner,
        previous=previous,
        status="queued",
        created_at=now,
        expires_at=now + keep_s if keep_s else None,
        background=True,
        streams=streams,
        tier=tier.value,
        tries=0,
        request=request,
        input=items,
        answer=text,
        bytes=len(request) + len(items) + len(text),
    )


def _shown_item(response: str, number: int, item: Any) -> JsonObject:
    if not isinstance(item, dict):
        return {"type": "message", "id": f"msg_{number}", "content": item}
    kind = item.get("type") or "message"
    shown = {"type": kind, **item}
    if not shown.get("id"):
        # The same one at every call, and nobody else's.
        prefix = "msg" if kind == "message" else "item"
        shown["id"] = f"{prefix}_{response.removeprefix('resp_')}_{number}"
    if kind == "message":
        shown.setdefault("status", "completed")
        if isinstance(shown.get("content"), str):
            answered = shown.get("role") == "assistant"
            part = {"type": "output_text" if answered else "input_text", "text": shown["content"]}
            shown["content"] = [part | ({"annotations": []} if answered else {})]
    return shown
