"""Loop of background work, and loopback requests, which run stored requests.

A loopback request goes from the server to its own ASGI application, with the same checks as over
HTTP. It needs no admission permit and no API key: the owner was authenticated when the work was
stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from server.request.body import JSON_TYPE
from server.request.record import INTERNAL, InternalRequest

logger = logging.getLogger(__name__)

_FAILED_TURN_PAUSE_S = 1.0


class JobLoop:
    """Repeats a turn of work until it is cancelled. Used from the event loop."""

    def __init__(self, name: str, turn: Callable[[], Awaitable[float | None]]) -> None:
        """`turn` returns the seconds until the next turn, None to wait for `wake`."""
        self._name = name
        self._turn = turn
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Begin the next turn without a pause."""
        self._woken.set()

    async def run(self) -> None:
        """Run turns; a turn that raises is logged, and the next one follows after a second."""
        while True:
            self._woken.clear()
            pause_s: float | None = _FAILED_TURN_PAUSE_S
            try:
                pause_s = await self._turn()
            except Exception:
                logger.exception("%s: a turn failed", self._name)
            # Unlike `wait_for` of Python 3.11, this never loses a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()


_RETRIED_STATUSES = (429, 503)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class LoopbackResponse:
    status: int
    request_id: str
    body: bytes
    retry_after_s: float = 0.0


async def post_until_accepted(
    app: ASGIApp,
    path: str,
    body: bytes,
    internal: InternalRequest,
    on_chunk: Callable[[bytes], None] | None = None,
) -> LoopbackResponse:
    """POST a JSON body to `path` and return the response. Cancellation aborts the request.

    Repeats it after growing pauses while the server is busy or starts. `on_chunk` is called with
    each chunk of the response body.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        response = await _post(app, path, body, internal, on_chunk)
        if response.status not in _RETRIED_STATUSES:
            return response
        await asyncio.sleep(max(pause_s, response.retry_after_s))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


async def _post(
    app: ASGIApp,
    path: str,
    body: bytes,
    internal: InternalRequest,
    on_chunk: Callable[[bytes], None] | None,
) -> LoopbackResponse:
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
            if on_chunk is not None:
                on_chunk(chunks[-1])

    size = str(len(body)).encode()
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", JSON_TYPE.encode()), (b"content-length", size)],
        "client": None,
        "server": None,
        "state": {INTERNAL: internal},
    }
    await app(scope, receive, send)
    request_id = headers.get(b"x-request-id", b"").decode()
    retry_after_s = int(headers.get(b"retry-after-ms", 0)) / 1000
    return LoopbackResponse(status, request_id, b"".join(chunks), retry_after_s)
