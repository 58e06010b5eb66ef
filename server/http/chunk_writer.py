"""Writes chunks of a streamed response's body to its connection, past the application's layers."""

from __future__ import annotations

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION, _WRITER = "rbln_serve.chunks", "writer"


class ChunkWriter:
    """Writes the chunks of one HTTP/1.1 response, as uvicorn's `send` does for a message."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._transport = transport

    @property
    def is_ready(self) -> bool:
        """True between the response's head and end, while the client reads."""
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not cycle.flow.write_paused
            and not cycle.response_complete
            and not cycle.disconnected
            and not self._transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        """Send a chunk of the body; call it only while `is_ready`, never with empty bytes."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def chunk_extension(
    cycle: RequestResponseCycle, transport: asyncio.Transport
) -> dict[str, dict[object, object]]:
    """Return the `extensions` of an ASGI scope whose response `transport` sends."""
    return {_EXTENSION: {_WRITER: ChunkWriter(cycle, transport)}}


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """Return the writer of a request; None where a connection has none, such as HTTP/1.0's."""
    writer: ChunkWriter | None = scope.get("extensions", {}).get(_EXTENSION, {}).get(_WRITER)
    return writer
