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

_RETRIED_STATUSES = (429, 503)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class LoopbackResponse:
    """Complete response to a loopback request."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0


async def post_until_taken(
    app: ASGIApp,
    path: str,
    body: bytes,
    internal: InternalRequest,
    take: Callable[[bytes], None] | None = None,
) -> LoopbackResponse:
    """As `post`, again after growing pauses while the server is busy or starts."""
    pause_s = _FIRST_PAUSE_S
    while True:
        response = await post(app, path, body, internal, take)
        if response.status not in _RETRIED_STATUSES:
            return response
        await asyncio.sleep(max(pause_s, response.retry_after_s))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


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
    status, headers, chunks = 0, dict[bytes, bytes](), list[bytes]()

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            # The client never disconnects.
            await asyncio.Event().wait()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = dict(message["headers"])
        else:
            chunks.append(message.get("body", b""))
            if take is not None:
                take(chunks[-1])

    await app(_scope(path, len(body), internal), receive, send)
    request_id = headers.get(b"x-request-id", b"").decode()
    retry_after_s = int(headers.get(b"retry-after-ms", 0)) / 1000
    return LoopbackResponse(status, request_id, b"".join(chunks), retry_after_s)


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
