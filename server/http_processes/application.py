"""The application of an HTTP process: inference here, everything else by the main process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.admission import Admission
from server.app import add_layers
from server.errors import ServerError
from server.frontend import Frontend
from server.host.tasks import background_task
from server.http.auth import Access
from server.http.error_responses import send_error
from server.http.middleware import begin_record
from server.lifecycle import Lifecycle
from server.model_pool.forwarding import RequestBody, forward, unless_gone
from server.observability.event_loop import follow_event_loop
from server.observability.metrics import ServerMetrics
from server.request.body import ClientGoneError
from server.request.invocation import INVOCATIONS
from server.request.route_table import route_of, route_path
from server.routes.inference import add_inference_routes
from server.routes.response_store import ResponseStore
from server.settings import ServerSettings
from server.wire.endpoint import Endpoint

_PEER = b"x-rbln-serve-peer"
"""Header with the client's address, between the processes."""


def create_inference_app(
    settings: ServerSettings,
    lifecycle: Lifecycle,
    admission: Admission,
    metrics: ServerMetrics,
    frontend: Callable[[], Frontend],
    owner_salt: bytes,
) -> FastAPI:
    """Build the application of the routes that need the engine and no store."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        lag = background_task(follow_event_loop(metrics.observe_loop_lag))
        async with access.following_files(), lag:
            yield

    access = Access(settings, owner_salt)
    admission.divide(access.weights)
    app = FastAPI(lifespan=lifespan, root_path=settings.root_path, openapi_url=None)
    add_inference_routes(app, frontend, ResponseStore(frontend, None), settings, admission)
    add_layers(app, settings, lifecycle, admission, metrics, access, frontend)
    return app


def answered_here(*, stores: bool) -> frozenset[str]:
    """Return the paths that an HTTP process answers; with `stores` responses may be stored."""
    paths = {INVOCATIONS, *(endpoint.value for endpoint in Endpoint)}
    kept = {e.value for e in (Endpoint.RESPONSES, Endpoint.COMPACT, Endpoint.INPUT_TOKENS)}
    # A body of /invocations may be one of the Responses API.
    return frozenset(paths - kept - {INVOCATIONS} if stores else paths)


class ForwardingApp:
    """Passes requests for other paths than `here` on to the main process."""

    def __init__(self, app: ASGIApp, here: Collection[str], main: httpx.AsyncClient) -> None:
        self._app = app
        self._here = here
        self._main = main

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of scope pass through."""
        if scope["type"] != "http" or route_path(scope) in self._here:
            await self._app(scope, receive, send)
            return
        record = begin_record(scope, route_of(route_path(scope)))

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        headers = [(name, value) for name, value in scope["headers"] if name != _PEER]
        if scope.get("client") is not None:
            host, port = scope["client"]
            headers.append((_PEER, f"{port} {host}".encode("latin-1")))
        body = RequestBody(receive)
        try:
            await unless_gone(body, forward(self._main, scope, headers, body, send_and_note))
        except ClientGoneError:
            return
        except ServerError as error:
            if record.status:
                # The answer has begun; its connection ends.
                raise
            await send_error(error, send, record)


class ForwardedApp:
    """The main process's side: gives forwarded requests the address of their client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of the socket that only HTTP processes reach."""
        if scope["type"] == "http":
            peer = next((value for name, value in scope["headers"] if name == _PEER), None)
            scope["headers"] = [item for item in scope["headers"] if item[0] != _PEER]
            if peer is not None:
                port, _, host = peer.decode("latin-1").partition(" ")
                scope["client"] = (host, int(port))
        await self._app(scope, receive, send)
