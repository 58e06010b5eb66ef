"""A client's connection: uvicorn's HTTP/1.1 with limits, and an envelope for every refusal.

What a peer sends is bounded in bytes and in time wherever no request's own limits hold: before a
head, in it, between the pieces of a body, and after an answer that did not wait for the body.
Invariants: nothing is written into the middle of another request's answer; after a refusal
nothing that still comes is parsed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.errors import (
    HeadersTooLargeError,
    HeaderTimeoutError,
    InvalidHttpError,
    ServerError,
    WebSocketError,
)
from server.http.connections import Connections, Place
from server.http.http10 import Http10Connection
from server.http.refusal import refusal
from server.http.transport import PatientTransport
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

_MAX_PIPELINED = 32
"""Requests that a client may send ahead of the answer to an earlier one."""
_HEADER_SIGNS = len(b": \r\n")


class _OldVersionError(Exception):
    """The request under way is one of HTTP/1.0."""


class _UpgradeError(Exception):
    """The request under way offers another protocol, which nobody here speaks."""


class Connection(HttpToolsProtocol):
    """One connection, from the first byte to the last."""

    def __init__(
        self,
        config: Config,
        state: ServerState,
        app_state: dict[str, Any],
        settings: ServerSettings,
        connections: Connections,
    ) -> None:
        super().__init__(config, state, app_state)
        self._settings = settings
        self._counted = connections
        self._place: Place
        self._wire: asyncio.Transport
        self._out: PatientTransport
        # Of requests one after the other, the one whose answer is due.
        self._served: RequestResponseCycle | None = None
        # What to say once the answers before it are sent.
        self._refusal: ServerError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._in_body = False
        # The pieces of the head that is under way; None if it began inside of one.
        self._head: list[bytes] | None = []
        # Bytes since the parser last passed something on: what it keeps is not more.
        self._kept = 0
        # Bytes of a body that came after the answer.
        self._unwanted = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head, unless there are too many connections."""
        super().connection_made(transport)
        self._place = self._counted.enter(self.client)
        self._wire = transport
        self._out = PatientTransport(transport, self._settings, self._place, self._peer_sends)
        self.transport = self._out
        if self._place.refusal is None:
            self._allow(self._settings.header_timeout_s, self._head_is_late)
        elif self._place.tell:
            self._answer(self._place.refusal)
        else:
            self._out.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and end the request that it is about."""
        super().connection_lost(exc)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._served is not None:
            _end(self._served)
        self._out.lost()

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the connection is past that."""
        if self._out.leaving:
            self._out.drop(len(data))
            return
        if self._refusal is not None:
            self._out.pause_reading()
            return
        if self._in_body:
            if self._is_unwanted(data):
                return
        elif not self._in_head:
            self._head = [data]
        elif self._head is not None:
            self._head.append(data)
        self._kept += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
        else:
            if self._kept:
                self._check()

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
        if self._out.leaving or self._answered():
            self._out.abort()
        else:
            super().shutdown()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._unset_keepalive_if_required()
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Serve the request whose head is complete, or raise why not."""
        self._in_head = False
        if self._timer is not None:
            self._stop_timer()
        self._check_head()
        super().on_headers_complete()
        self._in_body = True
        self._head = None
        self._kept = 0
        # Fields after the body are no headers of the request, whose scope keeps its own list.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        """Pass a piece of a body on."""
        self._kept = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the request is here as a whole."""
        super().on_message_complete()
        self._in_body = False
        self._kept = self._unwanted = 0
        if self._timer is not None:
            self._stop_timer()

    # What answers call.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Go on with what came meanwhile."""
        super().on_response_complete()
        if not (self._in_head or self._in_body or self._refusal):
            return
        if self._out.is_closing() or self._busy():
            return
        if self._refusal is not None:
            self._answer(self._refusal)
        elif self._in_body:
            self._allow(self._settings.linger_s, self._leave_body)
        else:
            self._watch_head()

    # States.

    def _busy(self) -> bool:
        """Whether an answer is due."""
        served = self._served
        return served is not None and not (served.response_complete or served.disconnected)

    def _answered(self) -> bool:
        """Whether a request has its answer, and more of its body is to come."""
        return self._in_body and self.cycle.response_complete

    def _peer_sends(self) -> bool:
        return self._in_body

    # Limits.

    def _check(self) -> None:
        """Limit what the parser keeps, and for how long."""
        if self._kept > self._settings.max_header_bytes:
            self._refuse(self._too_large())
        else:
            self._watch_head()

    def _is_unwanted(self, data: bytes) -> bool:
        """Whether too much of a body has come that was answered already; then it has ended."""
        if self.cycle.response_complete:
            self._unwanted += len(data)
            if self._unwanted > self._settings.linger_bytes:
                self._leave_body()
                return True
        return False

    def _check_head(self) -> None:
        """Raise what is wrong with a head that is complete, or what it takes to serve it."""
        if self._kept > self._settings.max_header_bytes or self._head is None:
            size = len(self.url) + sum(len(n) + len(v) + _HEADER_SIGNS for n, v in self.headers)
            if size > self._settings.max_header_bytes:
                raise self._too_large()
        hosts = [name for name, _ in self.headers].count(b"host")
        version = self.parser.get_http_version()
        if self.parser.should_upgrade():
            raise self._upgrade()
        if version == "1.0":
            raise _OldVersionError
        if version != "1.1":
            raise InvalidHttpError(f"HTTP/1.1 is spoken here, not HTTP/{version}.")
        if hosts != 1:
            raise InvalidHttpError(f"A request has one Host header, this one has {hosts}.")
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise InvalidHttpError(
                f"More than {_MAX_PIPELINED} requests were sent ahead of their answers."
            )

    def _upgrade(self) -> Exception:
        if self._get_upgrade() == b"websocket":
            return WebSocketError("There are no WebSockets here; streams are server-sent events.")
        return _UpgradeError()

    def _too_large(self) -> ServerError:
        return HeadersTooLargeError(
            "The request's line and headers are larger than the limit of "
            f"{self._settings.max_header_bytes} bytes (--max-header-bytes)."
        )

    def _watch_head(self) -> None:
        """Limit the time of a head of which a part is here."""
        if self._in_head and self._timer is None and not self._busy():
            self._unset_keepalive_if_required()
            self._allow(self._settings.header_timeout_s, self._head_is_late)

    def _allow(self, seconds: float, late: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        error = HeaderTimeoutError(
            "The request's headers did not arrive within "
            f"{self._settings.header_timeout_s:g} s (--header-timeout-s)."
        )
        if self._in_head:
            self._refuse(error)
        else:
            # Nothing was asked, so nothing is answered.
            self._out.cut(error.code)

    def _leave_body(self) -> None:
        """Give up on a body whose request has been answered."""
        self._out.cut("unread_body")

    # Ends.

    def _fail(self, error: httptools.HttpParserError) -> None:
        """Do what is to be done about a request that the parser did not pass."""
        cause = error.__context__
        if isinstance(cause, ServerError):
            self._refuse(cause)
        elif isinstance(cause, _OldVersionError) and self._head and not self._busy():
            self._hand_over(b"".join(self._head))
        elif isinstance(cause, _UpgradeError) and self._head:
            self._decline_upgrade(b"".join(self._head))
        elif cause is None:
            self._refuse(InvalidHttpError(f"The request is not valid HTTP: {error}."))
        else:
            self._refuse(InvalidHttpError("The request is not valid HTTP, or not here."))

    def _hand_over(self, data: bytes) -> None:
        """Have HTTP/1.0, which knows no chunks, spoken by a parser that tells the two apart."""
        self.connections.discard(self)
        older = Http10Connection(
            self.config, self.server_state, self.app_state, self._settings, self._place
        )
        older.connection_made(self._wire)
        self._wire.set_protocol(older)
        older.data_received(data)

    def _decline_upgrade(self, data: bytes) -> None:
        """Read the request again without its offer, after which the parser takes no body."""
        head, end, rest = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(b"upgrade:")]
        if len(kept) == len(lines):
            self._refuse(InvalidHttpError("No tunnels are made here."))
            return
        self.parser = httptools.HttpRequestParser(self)
        self._kept = 0
        self.data_received(b"\r\n".join(kept) + end + rest)

    def _refuse(self, error: ServerError) -> None:
        """Answer with an error, after the answers that are due, and end the connection."""
        self._stop_timer()
        if self._in_body and self.cycle.response_started:
            # The fault is in the body of a request that has its status already.
            self._out.cut(error.code)
            return
        if self._in_body and self.cycle is self._served:
            _end(self.cycle)
        elif self._in_body:
            # It waits behind others, and would then wait for the rest of its body.
            self.pipeline.popleft()
        if self._busy():
            self._refusal = error
            self._out.pause_reading()
        else:
            self._answer(error)

    def _answer(self, error: ServerError) -> None:
        """Write the error; what the peer still sends is dropped."""
        logger.debug("connection of %s refused: %s", self.client, error.message)
        self._unset_keepalive_if_required()
        if error is not self._place.refusal:
            self._place.count(error.code)
        self._out.write(refusal(error, self.server_state.default_headers))
        self._out.linger()


def _end(cycle: RequestResponseCycle) -> None:
    """Tell a request's handler that its client is gone."""
    cycle.disconnected = True
    cycle.message_event.set()
