"""HTTP/1.0 for old clients and proxies: one request per connection, no chunked encoding.

`server.http.connection` has already read and checked the request's head.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from server.errors import InvalidHttpError
from server.http.connections import ConnectionSlot
from server.http.error_responses import raw_error_response
from server.http.transport import LingeringTransport


class Http10Connection(H11Protocol):
    """A connection with one HTTP/1.0 request, closed after the response."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        slot: ConnectionSlot,
    ) -> None:
        super().__init__(config, state, app_state)
        self._slot = slot
        self._out: LingeringTransport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take over the connection."""
        super().connection_made(transport)
        self._out = LingeringTransport(transport, self._slot, self._peer_sends)
        self.transport = self._out

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's slot."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._out.lost()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; drop them if the connection is closing."""
        if self._out.leaving:
            self._out.drop(len(data))
        else:
            super().data_received(data)

    def pause_writing(self) -> None:
        """Pause the application until the client reads, bounded by the write timeout."""
        super().pause_writing()
        self._out.watch_writing()

    def resume_writing(self) -> None:
        """Resume the application."""
        super().resume_writing()
        self._out.stop_watching()

    def shutdown(self) -> None:
        """Close the connection after the current response; the process is about to exit."""
        if self._out.leaving:
            self._out.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Send our error for invalid HTTP, or cut a response that has begun; ignores `msg`."""
        error = InvalidHttpError("The request is not valid HTTP.")
        if self.conn.our_state is h11.SEND_BODY:
            self._out.cut(error.code)
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._slot.count(error.code)
        self._out.write(raw_error_response(error, self.server_state.default_headers))
        self._out.linger()

    def _peer_sends(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY
