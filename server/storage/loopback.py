"""Requests that the server sends to its own ASGI application, with the same checks as over HTTP.

They need no admission permit and no API key: the owner was authenticated when the work was stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from server.request.body import JSON_TYPE
from server.request.record import INTERNAL, InternalRequest

RETRIED_STATUSES = (429, 503)
"""Statuses of a busy or starting server, after which the request is sent again."""


@dataclass(frozen=True, slots=True)
class LoopbackResponse:
    """Complete response to a loopback request."""

    status: int
    request_id: str
    body: bytes


async def post(
    app: ASGIApp,
    path: str,
    body: bytes,
    internal: InternalRequest,
    take: Callable[[bytes], None] | None = None,
) -> LoopbackResponse:
    """POST a JSON body to `path` and return the response. Cancellation aborts the request.

    `take` is called with each chunk of the response body.
    """
    is_sent = False
    status, request_id, chunks = 0, "", list[bytes]()

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            # The client never disconnects.
            await asyncio.Event().wait()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = dict(message["headers"]).get(b"x-request-id", b"").decode()
        else:
            chunks.append(message.get("body", b""))
            if take is not None:
                take(chunks[-1])

    await app(_scope(path, len(body), internal), receive, send)
    return LoopbackResponse(status, request_id, b"".join(chunks))


def _scope(path: str, size: int, internal: InternalRequest) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(size).encode())],
        "client": None,
        "server": None,
        "state": {INTERNAL: internal},
    }
