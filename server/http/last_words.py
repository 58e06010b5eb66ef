"""How an answer ends that fails: with its own status, or where a stream has begun with a frame."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from starlette.types import Send

from server.errors import ServerError
from server.request.record import RequestRecord
from server.wire.endpoint import Endpoint
from server.wire.sse import named_frame

_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_MOST_S = 0.5


async def send_error(error: ServerError, send: Send, record: RequestRecord) -> None:
    """Say in the endpoint's manner why there is no answer, or no more of it; note the outcome."""
    if record.complete:
        return
    record.note(error)
    endpoint = _ENDPOINTS.get(record.route.template)
    if not record.status:
        await _send_envelope(error, record, send)
    elif record.stream and endpoint is not None:
        make = record.failure_frames
        frames = error_frame(error, endpoint, record) if make is None else make(error)
        # A client that does not read any more does not get to hold the connection, either.
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOST_S):
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
    """Return the frames that end the failed stream of a request, in the endpoint's form."""
    if endpoint is Endpoint.RESPONSES:
        return named_frame("error", json.dumps(error.response_event(record.sent_frames)))
    if endpoint.anthropic:
        return named_frame("error", error.anthropic_body(record.request_id))
    return f"data: {error.body().decode()}\n\ndata: [DONE]\n\n"
