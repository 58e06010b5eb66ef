"""A client connection: uvicorn's HTTP/1.1 protocol with limits and JSON error responses.

Bytes and time are bounded where no request limit applies: before and inside a request head,
between the chunks of a body, and after a response that was sent before the body was complete.
Invariants: an error response never interrupts another response; after an error response no further
input is parsed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server import bounds
from server.errors import (
    HeadersTooLargeError,
    HeaderTimeoutError,
    InvalidHttpError,
    ServerError,
    TransferCodingError,
    WebSocketError,
    describe,
)
from server.http.streaming import CHUNKS, ChunkWriter
from server.http.transport import Connections, ConnectionSlot, LingeringTransport
from server.request.record import REQUEST_ID_HEADER
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

_MAX_PIPELINED = 32
"""Requests that a client may send before an earlier one is answered."""
_HEADER_OVERHEAD = len(b": \r\n")
_CLOSE_WAIT = 8
"""Linux's state of a TCP socket whose peer has sent its last byte and has not reset it."""
_MIN_WATCH_S, _MAX_WATCH_S = 0.01, 1.0
"""Shortest and longest time between two looks at this state."""


class _UpgradeError(Exception):
    """The current request offers an upgrade to an unsupported protocol."""


class Connection(HttpToolsProtocol):
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
        self._connections = connections
        self._slot: ConnectionSlot
        self._wire: asyncio.Transport
        self._out: LingeringTransport
        # The request that is answered now, of several pipelined ones.
        self._served: RequestResponseCycle | None = None
        # The error to send after the responses to earlier requests.
        self._refusal: ServerError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._in_body = False
        # The chunks of the current head; None if the head began inside a chunk.
        self._head: list[bytes] | None = []
        # Bytes since the parser's last event: an upper bound of its buffer.
        self._buffered = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header timeout, or refuse the connection if there are too many."""
        super().connection_made(transport)
        self._slot = self._connections.enter(self.client)
        self._wire = transport
        self._out = LingeringTransport(transport, self._slot, self._peer_sends)
        self.transport = self._out
        if self._slot.refusal is None:
            self._start_timer(bounds.HEADER_TIMEOUT_S, self._on_header_timeout)
        elif self._slot.reports:
            self._answer(self._slot.refusal)
        else:
            self._out.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's slot and cancel its request."""
        super().connection_lost(exc)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._served is not None:
            _end(self._served)
        self._out.lost()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True to answer a client that has only ended its sending side.

        A client that has closed its socket sends the same end, and resets the connection when more
        arrives. So the first byte of what is due is sent at once. It is no probe of its own: the
        client reads the same bytes as without it.
        """
        served = self._served
        if served is None or not self._busy() or self._in_head or self._in_body or self._refusal:
            return False
        has_no_length = served.chunked_encoding is False and not served.expected_content_length
        if has_no_length or not self._wire.can_write_eof():
            # No byte of an HTTP/1.0 stream can be sent early. TLS has no half-close.
            return False
        self.cycle.keep_alive = False
        if not served.response_started:
            self._out.write_early(b"H")
        elif served.chunked_encoding:
            # The size of a chunk may begin with zeros.
            self._wire.write(b"0")
        self._watch_reset(_MIN_WATCH_S)
        return True

    def _watch_reset(self, seconds: float) -> None:
        """Cancel the requests of a half-closed connection that the client resets.

        Event loops do not poll a socket after its end of input.
        """
        connection = self._wire.get_extra_info("socket")
        if connection.family == socket.AF_UNIX or self._out.is_closing():
            # A write to a closed UNIX socket fails at once.
            return
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _CLOSE_WAIT:
            self._out.abort()
            return
        later = min(2 * seconds, _MAX_WATCH_S)
        self._start_timer(seconds, partial(self._watch_reset, later))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; drop them if the connection is closing."""
        if self._out.leaving or (self._in_body and self.cycle.response_complete):
            self._out.drop(len(data))
        if self._out.leaving:
            return
        if self._refusal is not None:
            self._out.pause_reading()
            return
        if not self._in_head:
            self._head = None if self._in_body else [data]
        elif self._head is not None:
            self._head.append(data)
        self._buffered += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
        else:
            if self._buffered:
                self._check()

    def pause_writing(self) -> None:
        """Pause the application until the client reads, bounded by the write timeout."""
        super().pause_writing()
        self._out.watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._out.stop_watching()

    def shutdown(self) -> None:
        """Close the connection after the current response; the process is about to exit."""
        if self._out.leaving or (self._in_body and self.cycle.response_complete):
            self._out.abort()
        else:
            super().shutdown()

    # Parser callbacks.

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start serving the request; raises if its head is invalid."""
        self._in_head = False
        if self._timer is not None:
            self._stop_timer()
        if self._buffered > self._settings.max_header_bytes or self._head is None:
            size = len(self.url) + sum(len(n) + len(v) + _HEADER_OVERHEAD for n, v in self.headers)
            if size > self._settings.max_header_bytes:
                raise self._too_large()
        hosts = [name for name, _ in self.headers].count(b"host")
        codings = [v for name, v in self.headers if name == b"transfer-encoding"]
        version = self.parser.get_http_version()
        if self.parser.should_upgrade():
            raise self._upgrade()
        if version not in ("1.0", "1.1"):
            raise InvalidHttpError(f"version: must be HTTP/1.1, got HTTP/{version}.")
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise InvalidHttpError(f"Host: must occur once, got {hosts} headers.")
        if codings:
            value = b",".join(codings).decode("latin-1")
            names = [name.strip().lower() for name in value.split(",") if name.strip()]
            if version == "1.0" or names[-1:] != ["chunked"] or names.count("chunked") > 1:
                raise InvalidHttpError(
                    f"Transfer-Encoding: {describe(value)} is not valid HTTP/{version}."
                )
            if names != ["chunked"]:
                raise TransferCodingError(
                    f"Transfer-Encoding: only 'chunked' is supported, got {describe(value)}."
                )
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise InvalidHttpError(
                f"More than {_MAX_PIPELINED} pipelined requests wait for a response."
            )
        super().on_headers_complete()
        self.cycle.keep_alive = self.parser.should_keep_alive()
        self._in_body = True
        self._head = None
        self._buffered = 0
        # Trailers must not reach the request's headers; its scope keeps the old list.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        self._buffered = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        self._buffered = 0
        self._out.stop_dropping()

    # Response callbacks.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _http10_app(app, cycle)
        cycle.scope["extensions"] = {CHUNKS: {"writer": ChunkWriter(cycle, self._wire)}}
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Continue with input received during the response."""
        super().on_response_complete()
        if not (self._in_head or self._in_body or self._refusal):
            return
        if self._out.is_closing() or self._busy():
            return
        if self._refusal is not None:
            self._answer(self._refusal)
        elif self._in_body:
            self._out.start_dropping(partial(self._out.cut, "unread_body"), is_body=True)
        else:
            self._watch_head()

    # States.

    def _busy(self) -> bool:
        """Return whether a response is in progress."""
        served = self._served
        return served is not None and not (served.response_complete or served.disconnected)

    def _peer_sends(self) -> bool:
        return self._in_body

    # Limits.

    def _check(self) -> None:
        """Bound the size and the time of the parser's buffer."""
        if self._buffered > self._settings.max_header_bytes:
            self._refuse(self._too_large())
        else:
            self._watch_head()

    def _upgrade(self) -> Exception:
        if self._get_upgrade() == b"websocket":
            return WebSocketError("WebSockets are not supported; streams are server-sent events.")
        return _UpgradeError()

    def _too_large(self) -> ServerError:
        return HeadersTooLargeError(
            "The request's line and headers are larger than the limit of "
            f"{self._settings.max_header_bytes} bytes (--max-header-bytes)."
        )

    def _watch_head(self) -> None:
        """Start the header timeout for a head that is partly received."""
        if self._in_head and self._timer is None and not self._busy():
            self._unset_keepalive_if_required()
            self._start_timer(bounds.HEADER_TIMEOUT_S, self._on_header_timeout)

    def _start_timer(self, seconds: float, expired: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, expired)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_header_timeout(self) -> None:
        error = HeaderTimeoutError(
            f"The request's headers did not arrive within {bounds.HEADER_TIMEOUT_S:g} s."
        )
        if self._in_head:
            self._refuse(error)
        else:
            # No request was begun, so no response is due.
            self._out.cut(error.code)

    # Ends.

    def _fail(self, error: httptools.HttpParserError) -> None:
        """Handle a parser error by the exception that caused it."""
        cause = error.__context__
        if isinstance(cause, ServerError):
            self._refuse(cause)
        elif isinstance(cause, _UpgradeError) and self._head:
            self._decline_upgrade(b"".join(self._head))
        elif cause is None:
            self._refuse(InvalidHttpError(f"The request is not valid HTTP: {error}."))
        else:
            self._refuse(InvalidHttpError("The request is not valid HTTP or is not supported."))

    def _decline_upgrade(self, data: bytes) -> None:
        """Parse the request again without its Upgrade header, after which httptools stops."""
        head, end, rest = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        other_lines = [line for line in lines if not line.lower().startswith(b"upgrade:")]
        if len(other_lines) == len(lines):
            self._refuse(InvalidHttpError("CONNECT tunnels are not supported."))
            return
        self.parser = httptools.HttpRequestParser(self)
        self._buffered = 0
        self.data_received(b"\r\n".join(other_lines) + end + rest)

    def _refuse(self, error: ServerError) -> None:
        """Send an error after the responses that are due, then close the connection."""
        self._stop_timer()
        if self._in_body and self.cycle.response_started:
            # The body is invalid, but its response has begun.
            self._out.cut(error.code)
            return
        if self._in_body and self.cycle is self._served:
            _end(self.cycle)
        elif self._in_body:
            # A pipelined request whose body will not be completed.
            self.pipeline.popleft()
        if self._busy():
            self._refusal = error
            self._out.pause_reading()
        else:
            self._answer(error)

    def _answer(self, error: ServerError) -> None:
        """Write the error response; further input is dropped."""
        logger.debug("connection of %s refused: %s", self.client, error.message)
        self._unset_keepalive_if_required()
        if error is not self._slot.refusal:
            self._slot.count(error.code)
        self._out.write(_raw_error_response(error, self.server_state.default_headers))
        self._out.linger()


def _end(cycle: RequestResponseCycle) -> None:
    """Signal a disconnect to a request's handler."""
    cycle.disconnected = True
    cycle.message_event.set()


def _raw_error_response(
    error: ServerError, default_headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Return a complete HTTP/1.1 error response with a new request id and `connection: close`.

    For errors found before a request reaches the application.
    """
    body = error.body()
    status = HTTPStatus(error.status)
    headers = [
        *default_headers,
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (REQUEST_ID_HEADER, uuid.uuid4().hex.encode("ascii")),
        (b"connection", b"close"),
    ]
    lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", body])


def _http10_app(app: Any, cycle: RequestResponseCycle) -> Any:
    """Return the ASGI application of a cycle of HTTP/1.0.

    Its clients read neither chunks nor interim responses: a body without a length ends with the
    connection.
    """
    cycle.waiting_for_100_continue = False

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                has_length = b"content-length" in names
                if not has_length:
                    # Uvicorn sends chunks unless this is set.
                    cycle.chunked_encoding = cycle.keep_alive = False
                elif cycle.keep_alive and b"connection" not in names:
                    message["headers"] = [*message["headers"], (b"connection", b"keep-alive")]
            elif not has_length:
                # Uvicorn compares it with the body.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return respond
