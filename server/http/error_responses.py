"""Error responses: over ASGI, as the last frame of a started stream, or as raw HTTP bytes."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus

from starlette.types import Send

from server.errors import ServerError
from server.request.endpoints import INVOCATIONS
from server.request.record import REQUEST_ID_HEADER, RequestRecord
from server.wire.endpoint import Endpoint
from server.wire.sse import named_frame

# Streams of /invocations are chats or completions, whose error frames are equal.
_ENDPOINTS = {INVOCATIONS: Endpoint.CHAT} | {endpoint.value: endpoint for endpoint in Endpoint}
_MAX_SEND_S = 0.5


async def send_error(error: ServerError, send: Send, record: RequestRecord) -> None:
    """Send the error in the endpoint's format, unless the response is complete; set the outcome."""
    if record.complete:
        return
    record.note(error)
    endpoint = _ENDPOINTS.get(record.route.template)
    if not record.status:
        await _send_envelope(error, record, send)
    elif record.stream and endpoint is not None:
        make = record.failure_frames
        frames = error_frame(error, endpoint, record) if make is None else make(error)
        # A client that stopped reading must not hold the connection.
        with suppress(TimeoutError):
            async with asyncio.timeout(_MAX_SEND_S):
                last = {"type": "http.response.body", "body": frames.encode(), "more_body": False}
                await send(last)


async def _send_envelope(error: ServerError, record: RequestRecord, send: Send) -> None:
    body = error.anthropic_body(record.request_id) if record.anthropic else error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(k.encode(), v.encode()) for k, v in error.headers.items()]
    status = error.status
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def error_frame(error: ServerError, endpoint: Endpoint, record: RequestRecord) -> str:
    """Return the SSE frames that end a failed stream, in the endpoint's format."""
    if endpoint is Endpoint.RESPONSES:
        return named_frame("error", json.dumps(error.response_event(record.sent_frames)))
    if endpoint.anthropic:
        return named_frame("error", error.anthropic_body(record.request_id))
    return f"data: {error.body().decode()}\n\ndata: [DONE]\n\n"


def raw_error_response(error: ServerError, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a complete HTTP/1.1 error response with a new request id and `connection: close`.

    For errors found before a request reaches the application.
    """
    body = error.body()
    status = HTTPStatus(error.status)
    headers = [
        *default_headers,
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (REQUEST_ID_HEADER, uuid.uuid4().hex.encode("ascii")),
        (b"connection", b"close"),
    ]
    lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", body])
