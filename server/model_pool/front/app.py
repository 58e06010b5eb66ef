"""The front process's ASGI application: its own routes, and all others forwarded to the models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from server import bounds
from server.errors import MethodNotAllowedError, RouteNotFoundError, describe
from server.http.auth import Access
from server.http.origins import allow_origins
from server.lifecycle import Lifecycle
from server.model_pool.choice.model_choice import ChosenModel, ModelChoice
from server.model_pool.forwarding import Headers, RequestBody, forward, unless_gone
from server.model_pool.front.loading_stream import LoadingStream
from server.model_pool.front.metrics import FrontMetrics, front_metrics_router
from server.model_pool.front.middleware import FORWARDED, FrontMiddleware
from server.model_pool.front.model_routes import model_routes
from server.model_pool.front.pool_routes import pool_router
from server.model_pool.front.probes import probes_router
from server.model_pool.model_process import ModelProcess
from server.model_pool.pool import ModelPool
from server.model_pool.pooled_model import ModelState
from server.observability.metrics import ServerMetrics
from server.request.record import RequestRecord, record_of
from server.request.route_table import OTHER, scope_of
from server.request.route_table import Scope as KeyScope
from server.routes.admin import admin_router
from server.routes.console import console_router
from server.settings import ServerSettings

_OURS: dict[str, Any] = {"title": "rbln-serve", "openapi_url": None, "redirect_slashes": False}
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_CHANGES = (KeyScope.ADAPTERS, KeyScope.ADMIN)


def create_front_app(
    settings: ServerSettings,
    lifecycle: Lifecycle,
    pool: ModelPool,
    metrics: ServerMetrics,
    versions: Mapping[str, str],
) -> FastAPI:
    """Build the application."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with access.following_files():
            yield

    access = Access(settings)
    choice = ModelChoice(pool.models, settings)
    app = FastAPI(lifespan=lifespan, root_path=settings.root_path, **_OURS)
    app.include_router(probes_router(lifecycle, pool, versions))
    app.include_router(pool_router(pool, choice, settings))
    app.include_router(model_routes(pool, choice))
    app.include_router(front_metrics_router(FrontMetrics(pool, metrics)))
    app.include_router(admin_router(settings, lifecycle))
    if settings.console:
        app.include_router(console_router())
    own = {path for route in app.routes if (path := getattr(route, "path", None)) is not None}
    forwarder = Forwarder(pool, choice, own, bounds.STREAM_COMMIT_S)
    app.router.routes.append(StarletteRoute("/{path:path}", forwarder, methods=_METHODS))
    app.add_middleware(FrontMiddleware, lifecycle=lifecycle, access=access, metrics=metrics)
    allow_origins(app, settings)
    return app


class Forwarder:
    """Forwards each request to its model's process, which is loaded if need be."""

    def __init__(
        self, pool: ModelPool, choice: ModelChoice, own: set[str], commit_s: float
    ) -> None:
        """`own` are the paths of the front process's own routes.

        A stream shows the progress of its model's load after `commit_s` seconds.
        """
        self._commit_s = commit_s
        self._pool = pool
        self._choice = choice
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        record = record_of(scope)
        where = f"{scope['method']} {describe(scope['path'])}"
        if record.route is OTHER:
            raise RouteNotFoundError(f"There is no route {where}.")
        if record.route.template in self._own:
            raise MethodNotAllowedError(f"{where} is not allowed.")
        body = RequestBody(receive)
        choice = await self._choice.of_request(record.route, scope, body)
        await unless_gone(body, self._serve(choice, record, scope, body, send))

    async def _serve(
        self,
        choice: ChosenModel,
        record: RequestRecord,
        scope: Scope,
        body: RequestBody,
        send: Send,
    ) -> None:
        """Wait for the model and forward the request; a stream shows the progress of the load."""
        model = choice.model
        if choice.streams and model.state is not ModelState.READY:
            story = partial(self._pool.story, model)
            stream = LoadingStream(send, record, story, self._commit_s)
            send = stream.send
            async with stream.waiting() as end_comments, self._pool.lease(model) as process:
                await end_comments()
                await self._forward(process, record, scope, body, send)
            return
        async with self._pool.lease(model) as process:
            await self._forward(process, record, scope, body, send)

    async def _forward(
        self,
        process: ModelProcess,
        record: RequestRecord,
        scope: Scope,
        body: RequestBody,
        send: Send,
    ) -> None:
        scope["state"][FORWARDED] = True
        await forward(process.client, scope, forwarded_headers(record, scope), body, send)


def forwarded_headers(record: RequestRecord, scope: Scope) -> Headers:
    """Return the headers for a model's process.

    It trusts all clients of its socket as programs on this host, unless a header names another
    address. Changes were permitted here.
    """
    headers: Headers = scope["headers"]
    client = scope.get("client")
    changes = scope_of(record.route, record.method) in _CHANGES
    if record.caller.is_admin or changes or client is None:
        return headers
    return [*headers, (b"x-forwarded-for", str(client[0]).encode("latin-1"))]
