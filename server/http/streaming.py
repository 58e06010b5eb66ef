"""Server-sent events, and work that is cancelled when the client disconnects.

Invariants: a disconnect cancels the work within one iteration of the event loop, so that the
engine aborts the request; an error before the first content frame raises, so that it gets its own
status; an error later raises as well, and `server.http.middleware` ends the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.request.body import ClientGoneError
from server.request.record import Deadline, RequestRecord
from server.wire import COMMENT_PERIOD_S, PromptProgress

T = TypeVar("T")

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Turns off response buffering in nginx.
    (b"x-accel-buffering", b"no"),
]
COMMENT = ": keep-alive\n\n"
PING = 'event: ping\ndata: {"type": "ping"}\n\n'
"""The keep-alive frame of Anthropic's API, where the others send a comment."""
CHUNKS = "rbln_serve.chunks"
"""Extension of an ASGI scope with the `ChunkWriter` of its connection."""
_END = {"type": "http.response.body", "body": b"", "more_body": False}


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], deadline: Deadline | None = None
) -> T:
    """Run `work`; cancel it and raise `ClientGoneError` if the client disconnects first.

    The request's body must have been read: the next message is a disconnect. Raises
    `DeadlineError` when the deadline expires first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(receive))
    try:
        seconds = None if deadline is None else deadline.remaining_s
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait({task, gone}, timeout=seconds, return_when=first)
        if task.done():
            return task.result()
        if gone.done() or deadline is None:
            raise ClientGoneError
        raise deadline.error()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task, gone})
        if not task.cancelled():
            # Marks the exception of cancelled work as retrieved.
            task.exception()


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def commit(
    frames: AsyncGenerator[str, None],
    prelude: tuple[str, ...],
    timeout_s: float,
    begun: asyncio.Event | None = None,
) -> HeldStream:
    """Wait for the first frame without a beginning in `prelude`, then return the whole stream.

    Raises the generator's exceptions until then. After `timeout_s` seconds, or once `begun` is set,
    it returns the stream anyway, so that a request that waits in the queue gets its headers.
    """
    first_frames: list[str] = []
    deadline = time.monotonic() + timeout_s
    early: list[asyncio.Future[Any]] = []
    if begun is not None:
        early.append(asyncio.ensure_future(begun.wait()))
    pending: asyncio.Future[str | None] | None = None
    try:
        while True:
            # None at the end: a task cannot raise StopAsyncIteration.
            pending = asyncio.ensure_future(anext(frames, None))
            await asyncio.wait(
                {pending, *early},
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not pending.done():
                break
            done, pending = pending, None
            if (frame := done.result()) is None:
                break
            first_frames.append(frame)
            if not frame.startswith(prelude):
                break
    except BaseException:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})
        await frames.aclose()
        raise
    finally:
        for waiter in early:
            waiter.cancel()
    return HeldStream(frames, first_frames, pending)


@dataclass(slots=True)
class HeldStream:
    """The buffered first frames, then the rest of the source; `pending` is None at its end."""

    frames: AsyncGenerator[str, None]
    first_frames: list[str] = field(default_factory=list)
    pending: asyncio.Future[str | None] | None = None

    def __aiter__(self) -> HeldStream:
        return self

    async def __anext__(self) -> str:
        if self.first_frames:
            return self.first_frames.pop(0)
        if self.pending is None:
            return await anext(self.frames)
        try:
            frame = await self.pending
        finally:
            self.pending = None
        if frame is None:
            raise StopAsyncIteration
        return frame

    async def aclose(self) -> None:
        if self.pending is not None:
            # A generator cannot be closed while a task runs it.
            self.pending.cancel()
            await asyncio.wait({self.pending})
        await self.frames.aclose()


class SseResponse(Response):
    """A response that sends SSE frames as they are produced."""

    def __init__(
        self,
        frames: HeldStream,
        record: RequestRecord,
        keep_alive_s: float = 0.0,
        beat: str = COMMENT,
    ) -> None:
        """Send the frame `beat` after `keep_alive_s` seconds without a frame; 0: never."""
        super().__init__()
        self._frames = frames
        self._record = record
        self._keep_alive_s = keep_alive_s
        self._beat = beat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; a disconnect closes its source."""
        # None where a connection has no writer, such as HTTP/1.0's.
        writer: ChunkWriter | None = scope.get("extensions", {}).get(CHUNKS, {}).get("writer")
        if writer is not None:
            writer.record = self._record
        async with aclosing(self._frames):
            try:
                await until_disconnect(receive, self._pump(send, writer), self._record.deadline)
            except ClientGoneError:
                self._record.outcome = "aborted"

    async def _pump(self, send: Send, writer: ChunkWriter | None) -> None:
        direct = self._record.direct
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        tasks = [asyncio.ensure_future(self._keep_alive(send))] if self._keep_alive_s else []
        progress = self._record.progress
        if progress is not None and progress.is_expected:
            tasks.append(asyncio.ensure_future(_follow_progress(progress, send)))
        try:
            async for frame in self._frames:
                direct.writer = None
                if progress is not None and progress.sends_chunks and progress.changed.is_set():
                    # They come before the text, even if it is there as early.
                    await _send_progress(progress, send)
                self._record.sent_frames += 1
                await send(_chunk(frame))
                if writer is not None:
                    direct.resume(frame, writer)
        finally:
            direct.writer = None
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        await send(_END)

    async def _keep_alive(self, send: Send) -> None:
        """Send a keep-alive frame whenever half a period passed without a frame."""
        while True:
            before = self._record.sent_frames
            await asyncio.sleep(self._keep_alive_s / 2)
            if self._record.sent_frames == before:
                await send(_chunk(self._beat))


async def _follow_progress(progress: PromptProgress, send: Send) -> None:
    """Send the progress of the prompt; the engine reports none after the first token."""
    while True:
        await progress.changed.wait()
        await _send_progress(progress, send)
        await asyncio.sleep(0.0 if progress.sends_chunks else COMMENT_PERIOD_S)


async def _send_progress(progress: PromptProgress, send: Send) -> None:
    for frame in progress.take():
        await send(_chunk(frame))


def _chunk(frame: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": frame.encode(), "more_body": True}


@dataclass(slots=True)
class ChunkWriter:
    """Writes chunks of a streamed response's body to its connection, past the application's layers.

    They are written as uvicorn's `send` does for a message, and counted in the request's record.
    """

    cycle: RequestResponseCycle
    transport: asyncio.Transport
    record: RequestRecord = field(init=False)

    @property
    def is_ready(self) -> bool:
        """True between the response's head and end, while the client reads."""
        cycle = self.cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.flow.write_paused
            and not cycle.response_complete
            and not cycle.disconnected
            and not self.transport.is_closing()
        )

    def write(self, frame: bytes) -> None:
        """Send a frame; call it only while `is_ready`, never with empty bytes."""
        self.record.sent_frames += 1
        self.record.sent_bytes += len(frame)
        self.transport.write(b"%x\r\n%b\r\n" % (len(frame), frame))
