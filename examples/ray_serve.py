"""Ray Serve application whose replicas each run one rbln-serve process and forward HTTP to it.

`serve run examples.ray_serve:build arguments="MODEL --served-model-name NAME"`. Needs
`pip install "ray[serve]"`.
"""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
from ray import serve
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse

_POLL_S = 0.5
_STOP_S = 40
# Headers of one connection, which the next one sets itself.
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
# Headers that Ray Serve adds to answers, the request id as the server gave it.
_RAY = {"date", "server", "x-request-id"}


# Ray starts a replica again that check_health fails three times; the server limits requests itself.
@serve.deployment(max_ongoing_requests=256, graceful_shutdown_timeout_s=_STOP_S)
class RblnServer:
    """One replica: the server as a child process on a free port of the loopback address."""

    def __init__(self, arguments: str, start_s: float = 7200) -> None:
        """Start `rbln-serve serve ARGUMENTS`; raises `RuntimeError` if it ends or is too slow."""
        port = _free_port()
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "server", "serve", *shlex.split(arguments), *address]
        )
        self._url = f"http://127.0.0.1:{port}"
        self._client = httpx.AsyncClient(
            base_url=self._url, timeout=None, limits=httpx.Limits(max_connections=None)
        )
        end = time.monotonic() + start_s
        while not _answers(f"{self._url}/readyz"):
            if self._process.poll() is not None:
                raise RuntimeError(f"rbln-serve ended with {self._process.returncode}")
            if time.monotonic() > end:
                self._stop()
                raise RuntimeError(f"rbln-serve was not ready after {start_s:g} s")
            time.sleep(_POLL_S)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Forward a request and stream the answer."""
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        headers = [(k, v) for k, v in request.headers.items() if k not in _HOP]
        forwarded = self._client.build_request(
            request.method, url, headers=headers, content=await request.body()
        )
        answer = await self._client.send(forwarded, stream=True)
        kept = {k: v for k, v in answer.headers.items() if k not in _HOP | _RAY}
        return StreamingResponse(
            *(answer.aiter_raw(), answer.status_code, kept),
            background=BackgroundTask(answer.aclose),
        )

    async def check_health(self) -> None:
        """Raise `RuntimeError` if the process ended or is about to."""
        if self._process.poll() is not None:
            raise RuntimeError(f"rbln-serve ended with {self._process.returncode}")
        answer = await self._client.get("/livez", timeout=10)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"rbln-serve is dying: {answer.text}")

    def __del__(self) -> None:
        """Drain: Ray has stopped new requests, SIGTERM lets running ones finish."""
        if hasattr(self, "_process"):
            self._stop()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def build(options: dict[str, Any]) -> serve.Application:
    """Return the application; `options` has `arguments` of `rbln-serve serve` and `start_s`."""
    return RblnServer.bind(options["arguments"], float(options.get("start_s", 7200)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
