"""Uvicorn's server on `server.http.connection`, and its TLS context that follows its files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import uvicorn

from server import bounds
from server.host.files import FileWatch, read_regular
from server.host.tasks import background_task, in_thread
from server.http.connection import Connection
from server.http.transport import Connections
from server.settings import ServerSettings, SettingsError

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
        config, state = self.config, self.lifespan.state
        connection = partial(
            Connection, config, self.server_state, state, self._settings, self._connections
        )
        for listener in sockets or ():
            server = await loop.create_server(
                connection,
                sock=listener,
                backlog=self.config.backlog,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else bounds.HEADER_TIMEOUT_S,
                ssl_shutdown_timeout=None if tls is None else bounds.LINGER_S,
            )
            self.servers.append(server)


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


logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 4 * 1024 * 1024


_Contents = tuple[bytes, bytes, bytes | None]
"""The certificate, its key, and the authorities, None without --ssl-ca-certs."""


class Tls:
    """The TLS context of `settings` and its reload."""

    def __init__(self, settings: ServerSettings) -> None:
        """Build the context. Raises `SettingsError` naming the invalid file or flag."""
        self._settings = settings
        files = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        self._watch = FileWatch([file for file in files if file is not None])
        self.context = self._build(self._read())

    @asynccontextmanager
    async def following_files(self) -> AsyncIterator[None]:
        """Reload changed certificates while the block runs, with --enable-ssl-refresh."""
        if not self._settings.enable_ssl_refresh:
            yield
            return
        async with background_task(self._watch.follow(self._reload)):
            yield

    def _read(self) -> _Contents:
        settings = self._settings
        assert settings.ssl_certfile is not None
        assert settings.ssl_keyfile is not None
        authorities = settings.ssl_ca_certs
        return (
            _read_file("--ssl-certfile", settings.ssl_certfile),
            _read_file("--ssl-keyfile", settings.ssl_keyfile),
            None if authorities is None else _read_file("--ssl-ca-certs", authorities),
        )

    def _build(self, contents: _Contents) -> ssl.SSLContext:
        settings = self._settings
        # Python's defaults: TLS 1.2 and later, no weak ciphers.
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.verify_mode = ssl.VerifyMode[f"CERT_{settings.ssl_cert_reqs.upper()}"]
        try:
            self._load(context, contents)
            if settings.ssl_ciphers is not None:
                context.set_ciphers(settings.ssl_ciphers)
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"TLS cannot be set up from --ssl-certfile {settings.ssl_certfile}, --ssl-keyfile "
                f"{settings.ssl_keyfile}, --ssl-ca-certs {settings.ssl_ca_certs} and --ssl-ciphers "
                f"{settings.ssl_ciphers}: {error}"
            ) from None
        return context

    def _load(self, context: ssl.SSLContext, contents: _Contents) -> None:
        secret = self._settings.ssl_keyfile_password
        with ExitStack() as stack:
            paths = [
                None if content is None else stack.enter_context(_memory_file(content))
                for content in contents
            ]
            certificate, key, authorities = paths
            assert certificate is not None
            # A callable keeps OpenSSL from prompting for a password on the terminal.
            context.load_cert_chain(
                certificate, key, lambda: "" if secret is None else secret.get_secret_value()
            )
            if authorities is not None:
                context.load_verify_locations(authorities)

    async def _reload(self) -> None:
        """Load the files into the live context after a new context has accepted them.

        OpenSSL drops the old key as soon as it loads a certificate that does not match it.
        """
        try:
            contents = await in_thread(self._read)
            self._build(contents)
            # From memory and without an await: no handshake sees a partial update.
            self._load(self.context, contents)
        except (SettingsError, OSError) as error:
            logger.error("Kept the previous TLS certificate: %s", error)
        else:
            logger.info("Reloaded the TLS certificate")


def _read_file(flag: str, path: Path) -> bytes:
    try:
        return read_regular(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error}") from None


@contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """Yield the path of an in-memory file with `content`: OpenSSL loads certificates by path."""
    with os.fdopen(os.memfd_create("tls"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
