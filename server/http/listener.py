"""Uvicorn's server on `server.http.connection`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from server import bounds
from server.http.connection import Connection
from server.http.connections import Connections
from server.http.tls import Tls
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
"""Seconds without accepting after an error such as too many open files."""


_TICK_S = 1.0


class HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers: the service decides when to stop."""

    def __init__(
        self,
        config: uvicorn.Config,
        settings: ServerSettings,
        connections: Connections,
        *,
        shares: bool = False,
    ) -> None:
        """With `shares`, other processes accept from the same sockets."""
        super().__init__(config)
        self._settings = settings
        self._connections = connections
        self._shares = shares
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """End `serve`, which shuts down. Call it in the event loop."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """Set the date of answers every second until `stop`; upstream looks ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen on bound `sockets`."""
        await super().startup(sockets=[])
        loop = asyncio.get_running_loop()
        tls = self.config.ssl
        options: dict[str, Any] = {
            "ssl": tls,
            "ssl_handshake_timeout": None if tls is None else bounds.HEADER_TIMEOUT_S,
            "ssl_shutdown_timeout": None if tls is None else bounds.LINGER_S,
        }
        for listener in sockets or ():
            if self._shares:
                self.servers.append(SharedListener(listener, self._connection, options))  # type: ignore[arg-type]
                continue
            backlog = self.config.backlog
            server = await loop.create_server(
                self._connection, sock=listener, backlog=backlog, **options
            )
            self.servers.append(server)

    def stop_accepting(self) -> None:
        """Close the listening sockets of this process; connections stay."""
        for server in self.servers:
            server.close()

    def _connection(self) -> Connection:
        return Connection(
            self.config, self.server_state, self.lifespan.state, self._settings, self._connections
        )


class SharedListener:
    """Accepts connections of a socket that other processes accept from, too.

    It accepts one connection in a turn of the event loop, so that of many at once the processes
    with little to do get most; an event loop's own server would accept all that wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        connection: Callable[[], asyncio.Protocol],
        options: dict[str, Any],
    ) -> None:
        """Start accepting; `options` are those of `loop.connect_accepted_socket`."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._connection = connection
        self._options = options
        self._opening: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting in this process."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    async def wait_closed(self) -> None:
        """Wait for handshakes that have begun."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            # Another process was first, or the client has gone.
            return
        except OSError as error:
            logger.error("no connections for %g s: %s", _PAUSE_S, error)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_PAUSE_S, self._resume)
            return
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setblocking(False)
        opening = self._loop.create_task(self._open(client))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    async def _open(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._connection, client, **self._options)
        except (OSError, asyncio.CancelledError) as error:
            # As the event loop's own servers: a failed handshake closes the connection.
            logger.debug("a connection failed: %s", error)
            client.close()


async def serve_http(server: HttpServer, listener: socket.socket, tls: Tls | None) -> None:
    """Serve on a bound socket until `server.stop`, with TLS files that may change."""
    async with contextlib.nullcontext() if tls is None else tls.following_files():
        await server.serve(sockets=[listener])


def http_config(app: object, settings: ServerSettings, tls: Tls | None) -> uvicorn.Config:
    """Return uvicorn's configuration without its logging and access log."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        # The client is the peer of the socket; proxy headers are not trusted.
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_s,
        # The drain is over by then; remaining requests are cancelled.
        timeout_graceful_shutdown=1,
        # The head is complete and checked before h11 parses it.
        h11_max_incomplete_event_size=2 * settings.max_header_bytes,
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )
