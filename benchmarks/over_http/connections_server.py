"""The application without an engine, for `connections.py`.

``python -m benchmarks.over_http.connections_server uvicorn|ours`` prints its port and serves over
uvicorn's own connections or over those with limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import tempfile
import time
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from server.admission import Admission
from server.app import create_app
from server.frontend import Frontend
from server.http.connections import Connections
from server.http.listener import HttpServer, http_config
from server.lifecycle import Lifecycle
from server.observability.metrics import ServerMetrics
from server.settings import ServerSettings

FRAMES = 500
_FRAME = {
    "type": "http.response.body",
    "body": b'data: {"id":"chatcmpl-0","choices":[{"delta":{"content":" word"}}]}\n\n' * 3,
    "more_body": True,
}


class _Application:
    """The service's application, and a stream of constant frames."""

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics, folder: Path) -> None:
        self._app = create_app(
            settings,
            Lifecycle(time.monotonic()),
            Admission(None),
            metrics,
            self._no_frontend,
            {"version": "0"},
            folder,
            contextlib.nullcontext,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] != "/stream":
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(FRAMES):
            await send(_FRAME)
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    def _no_frontend(self) -> Frontend:
        raise AssertionError("no connection is ready")


async def _serve(side: str, folder: Path) -> None:
    settings, metrics = ServerSettings(), ServerMetrics(folder)
    config = http_config(_Application(settings, metrics, folder), settings, None)
    server: uvicorn.Server
    if side == "ours":
        server = HttpServer(config, settings, Connections(settings, metrics))
    else:
        server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    await server.serve([listener])


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as name,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(sys.argv[1], Path(name)))
