"""Uvicorn's server on `server.http.connection`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from server import bounds
from server.http.connection import Connection
from server.http.connections import Connections
from server.http.tls import Tls
from server.settings import ServerSettings

_TICK_S = 1.0


class HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers: the service decides when to stop."""

    def __init__(
        self, config: uvicorn.Config, settings: ServerSettings, connections: Connections
    ) -> None:
        super().__init__(config)
        self._settings = settings
        self._connections = connections
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
        for listener in sockets or ():
            server = await loop.create_server(
                self._connection,
                sock=listener,
                backlog=self.config.backlog,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else bounds.HEADER_TIMEOUT_S,
                ssl_shutdown_timeout=None if tls is None else bounds.LINGER_S,
            )
            self.servers.append(server)

    def _connection(self) -> Connection:
        return Connection(
            self.config, self.server_state, self.lifespan.state, self._settings, self._connections
        )


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
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )
