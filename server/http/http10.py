"""HTTP/1.0, for clients and proxies that still speak it: no chunks, and one request each.

`server.http.connection` has read the request's head by then, so that only the body, the answer and
the end are left.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from server.errors import InvalidHttpError
from server.http.connections import Place
from server.http.refusal import refusal
from server.http.transport import PatientTransport
from server.settings import ServerSettings


class Http10Connection(H11Protocol):
    """A connection of which the first request is one of HTTP/1.0; its answer is the last."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        settings: ServerSettings,
        place: Place,
    ) -> None:
        super().__init__(config, state, app_state)
        self._settings = settings
        self._place = place
        self._out: PatientTransport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection over."""
        super().connection_made(transport)
        self._out = PatientTransport(transport, self._settings, self._place, self._peer_sends)
        self.transport = self._out

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and end its request."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._out.lost()

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the connection is past that."""
        if self._out.leaving:
            self._out.drop(len(data))
        else:
            super().data_received(data)

    def pause_writing(self) -> None:
        """Have the application wait for the client, but not for ever."""
        super().pause_writing()
        self._out.watch_writing()

    def resume_writing(self) -> None:
        """Let the application go on."""
        super().resume_writing()
        self._out.stop_watching()

    def shutdown(self) -> None:
        """End the connection as soon as no answer is due on it; the process is about to end."""
        if self._out.leaving:
            self._out.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, unless the answer has begun; `msg` is uvicorn's."""
        error = InvalidHttpError("The request is not valid HTTP.")
        if self.conn.our_state is h11.SEND_BODY:
            self._out.cut(error.code)
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._place.count(error.code)
        self._out.write(refusal(error, self.server_state.default_headers))
        self._out.linger()

    def _peer_sends(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY
