"""Comments in a stream that waits for its model: the client sees the progress of the load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from starlette.types import Message, Send

from server.http.error_responses import ENDPOINTS
from server.http.streaming import SSE_HEADERS
from server.request.record import RequestRecord
from server.wire.endpoint import Endpoint
from server.wire.sse import named_frame

_PERIOD_S = 1.0
_EVENT_STREAM = b"text/event-stream"


class LoadingStream:
    """The answer to a stream, begun here if its model is not loaded within `after_s`."""

    def __init__(
        self, send: Send, record: RequestRecord, story: Callable[[], str], after_s: float
    ) -> None:
        self._send = send
        self._record = record
        self._story = story
        self._after_s = after_s
        self._ended = asyncio.Event()
        self._begun = False
        self._failed = False
        self._body = bytearray()

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Send comments during the block, until the yielded function is called."""
        task = asyncio.create_task(self._comment())

        async def end() -> None:
            self._ended.set()
            await asyncio.wait({task})

        try:
            yield end
        finally:
            await end()

    async def send(self, message: Message) -> None:
        """Send a message of the model's answer, whose start was sent if comments were."""
        if not self._begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._failed = not kind.startswith(_EVENT_STREAM)
        elif self._failed:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                frames = _error_frames(bytes(self._body), self._record)
                await self._send({"type": "http.response.body", "body": frames})
        else:
            await self._send(message)

    async def _comment(self) -> None:
        wait_s = self._after_s
        while not await self._ends_within(wait_s):
            wait_s = _PERIOD_S
            comment = f": loading: {self._story()}\n\n".encode()
            if not self._begun:
                self._begun = self._record.stream = True
                start = {"type": "http.response.start", "status": 200, "headers": SSE_HEADERS}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        return self._ended.is_set()


def _error_frames(body: bytes, record: RequestRecord) -> bytes:
    """Return the frames that end a stream with an error answer of the model's process."""
    endpoint = ENDPOINTS[record.route.template]
    if endpoint is Endpoint.RESPONSES:
        error = json.loads(body)["error"]
        beside = {name: error[name] for name in ("code", "message", "param")}
        event = {"type": "error", **beside, "error": error, "sequence_number": 0}
        return named_frame("error", json.dumps(event)).encode()
    if endpoint.anthropic:
        return named_frame("error", body).encode()
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"
