"""Client that sends given bytes over a plain connection."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    """A parsed answer; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The `code` of its error envelope."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.headers["x-request-id"]
        return str(error["code"])


@dataclass
class Wire:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw[:-4].split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        return int(first.split()[1]), headers

    async def answer(self) -> Answer:
        """Read an answer that has a length or chunks, or ends with the connection."""
        async with asyncio.timeout(10):
            status, headers = await self.head()
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                body = await self._chunks()
            else:
                body = await self.reader.read()
            return Answer(status, headers, body)

    async def closed(self, seconds: float = 10.0) -> bytes:
        """Wait for the connection's end and return what came until then."""
        async with asyncio.timeout(seconds):
            rest = b""
            with suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    rest += piece
            return rest

    async def send_until_cut(self, data: bytes, seconds: float = 10.0) -> int:
        """Send `data` over and over until the server ends the connection; return the bytes."""
        sent = 0
        async with asyncio.timeout(seconds):
            with suppress(ConnectionError):
                while not self.writer.transport.is_closing():
                    await self.send(data)
                    sent += len(data)
                    # Waiting for room in a buffer is no wait while there is some.
                    await asyncio.sleep(0)
        return sent

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        assert await self.reader.readline() == b"\r\n"
        return body


@asynccontextmanager
async def connected(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


def post(body: dict[str, Any] | bytes, *more: bytes, version: bytes = b"1.1") -> bytes:
    """Return a chat request with a body of known length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        b"POST %s HTTP/%s" % (CHAT.encode(), version),
        b"host: x",
        b"content-type: application/json",
        b"content-length: %d" % len(content),
        *more,
    ]
    return b"\r\n".join([*lines, b"", content])


def get(path: str, *more: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"GET %s HTTP/%s" % (path.encode(), version), b"host: x", *more]
    return b"\r\n".join([*lines, b"", b""])
