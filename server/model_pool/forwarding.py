"""Forwards a request to another process of the server and its answer to the client, byte for byte.

Invariant: a client that leaves ends the request in the other process too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import suppress

import httpx
from starlette.types import Message, Receive, Scope, Send

from server.errors import EngineFailedError
from server.request.body import ClientGoneError

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection", b"expect"),
}
_NOT_FORWARDED = _HOP_BY_HOP | {b"content-length"}
_NOT_RETURNED = _HOP_BY_HOP | {b"date", b"server"}
_RETRY_S = 2.0


class RequestBody:
    """The body of a request: the bytes that were read already, then those that still come."""

    def __init__(self, receive: Receive, read: bytes = b"", *, complete: bool = False) -> None:
        self._receive = receive
        self.read = read
        self.complete = complete
        self.received = asyncio.Event()
        """Set once the whole body was received."""
        if complete:
            self.received.set()

    async def next_chunk(self) -> bytes:
        """Receive another part and return it. Raises `ClientGoneError`."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        if not message.get("more_body", False):
            self.complete = True
            self.received.set()
        chunk: bytes = message.get("body", b"")
        return chunk

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the whole body."""
        if self.read:
            yield self.read
        while not self.complete:
            yield await self.next_chunk()


async def unless_gone(body: RequestBody, work: Coroutine[object, object, None]) -> None:
    """Run `work`, which reads the body, to its end.

    Raises `ClientGoneError` when the client leaves; `work` is cancelled then.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(body))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        await task
    finally:
        for each in (task, gone):
            each.cancel()
        # The other process notices that the client has left by the end of its connection.
        await asyncio.wait({task, gone})


async def _until_gone(body: RequestBody) -> None:
    """Return when the client leaves after its body was read; no other reader is left by then."""
    await body.received.wait()
    with suppress(ClientGoneError):
        while True:
            await body.next_chunk()


async def forward(
    client: httpx.AsyncClient, scope: Scope, headers: Headers, body: RequestBody, send: Send
) -> None:
    """Send the request and pass the answer on; `headers` replace those of `scope`.

    Raises `EngineFailedError` where the connection to the process ends too early.
    """
    request = httpx.Request(
        scope["method"],
        httpx.URL("http://model", raw_path=_target(scope)),
        headers=_request_headers(headers, body),
        content=_content(headers, body),
    )
    try:
        answer = await client.send(request, stream=True)
    except httpx.HTTPError as error:
        raise _lost(error) from None
    try:
        await send(_start(answer))
        try:
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except httpx.HTTPError as error:
            raise _lost(error) from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        await answer.aclose()


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path.partition(b"?")[0] + (b"?" + query if query else b"")


def _has_body(headers: Iterable[tuple[bytes, bytes]], body: RequestBody) -> bool:
    names = {name for name, _ in headers}
    return bool(body.read) or bool(names & {b"content-length", b"transfer-encoding"})


def _content(headers: Headers, body: RequestBody) -> bytes | AsyncIterator[bytes] | None:
    if not _has_body(headers, body):
        return None
    return body.read if body.complete else body.chunks()


def _request_headers(headers: Headers, body: RequestBody) -> Headers:
    kept = [(name, value) for name, value in headers if name not in _NOT_FORWARDED]
    if not _has_body(headers, body):
        return kept
    if body.complete:
        return [*kept, (b"content-length", b"%d" % len(body.read))]
    length = [value for name, value in headers if name == b"content-length"]
    framing = (b"content-length", length[0]) if length else (b"transfer-encoding", b"chunked")
    return [*kept, framing]


def _start(answer: httpx.Response) -> Message:
    headers = [
        (name.lower(), value)
        for name, value in answer.headers.raw
        if name.lower() not in _NOT_RETURNED
    ]
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}


def _lost(error: httpx.HTTPError) -> EngineFailedError:
    return EngineFailedError(
        f"The process that answers has ended or closed the connection ({type(error).__name__}).",
        retry_after_s=_RETRY_S,
    )
