"""The ASGI application: routes, the middleware around them, errors as envelopes.

Importing this module loads no torch, vllm or transformers: the process listens before they do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from server.admission import Admission
from server.errors import (
    InternalError,
    MethodNotAllowedError,
    RequestError,
    RouteNotFoundError,
    describe,
)
from server.frontend import Frontend
from server.host.tasks import background_task
from server.http.auth import Access
from server.http.middleware import AccessMiddleware, RequestMiddleware, allow_origins
from server.http.openapi import openapi_router
from server.lifecycle import Lifecycle
from server.observability.metrics import ServerMetrics, follow_event_loop
from server.observability.traffic import BucketAdvice, History, read_traffic
from server.request.body import CLIENT_GONE, JSON_TYPE, ClientGoneError
from server.request.record import get_record, get_request_id
from server.routes.admin import admin_router, cache_router, profile_router
from server.routes.batches import batches_router, files_router
from server.routes.console import console_router
from server.routes.health import health_router, metrics_router
from server.routes.inference import add_inference_routes
from server.routes.lora import lora_router
from server.routes.models import ShownPaths, models_router
from server.routes.responses import ResponseStore, responses_router
from server.routes.server_info import history_router, server_info_router
from server.routes.structured_outputs import structured_outputs_router
from server.settings import ServerSettings
from server.storage.services import StorageServices

# The document is our own, and a path has one spelling.
_APP_OPTIONS: dict[str, Any] = {
    "title": "rbln-serve",
    "openapi_url": None,
    "redirect_slashes": False,
}


def create_app(
    settings: ServerSettings,
    lifecycle: Lifecycle,
    admission: Admission,
    metrics: ServerMetrics,
    frontend: Callable[[], Frontend],
    versions: Mapping[str, str],
    run_dir: Path,
    background: Callable[[], AbstractAsyncContextManager[None]],
) -> FastAPI:
    """Build the application.

    `frontend` is only called once `lifecycle` is ready. The engine describes itself in `run_dir`.
    `background` is entered before the first request and left after the last; it starts the
    engine. Raises `SettingsError` where `--data-dir` cannot be used.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        observe_lag = partial(metrics.observe, "rbln_serve_event_loop_lag_seconds")
        lag = background_task(follow_event_loop(observe_lag))
        recorded = background_task(history.follow())
        stored = storage.working(app)
        async with access.following_files(), lag, recorded, stored, background():
            yield

    storage = StorageServices(settings, lifecycle, admission, metrics.decode_times)
    access = Access(settings, storage.owner_salt)
    if settings.api_key or settings.api_key_file is not None:
        admission.divide(access.weights)
    advice = BucketAdvice(run_dir)
    history = History(partial(read_traffic, run_dir / "metrics"))
    shown = ShownPaths(settings.lora_root)
    app = FastAPI(lifespan=lifespan, root_path=settings.root_path, **_APP_OPTIONS)
    # First: routes are tried in their order.
    responses = ResponseStore(frontend, storage.responses)
    add_inference_routes(app, frontend, responses, settings, admission)
    routers = [
        health_router(lifecycle, versions),
        metrics_router(metrics, settings, lifecycle, admission, frontend, advice, storage),
        server_info_router(settings, lifecycle, versions, run_dir, advice, shown, frontend),
        history_router(history),
        models_router(frontend, shown),
        files_router(storage.require_batches, settings),
        batches_router(storage.require_batches, settings),
        responses_router(storage.require_responses),
        structured_outputs_router(frontend, settings),
        lora_router(frontend, settings, metrics, shown),
        openapi_router(lifecycle, frontend, versions["version"], settings.root_path),
        admin_router(settings, lifecycle),
        cache_router(frontend),
        profile_router(frontend),
        *([console_router()] if settings.console else []),
    ]
    # `include_router` would build each route, with its types' validators, a second time.
    app.router.routes += (route for router in routers for route in router.routes)
    app.add_exception_handler(HTTPException, _raise_server_error)
    app.add_exception_handler(ClientGoneError, _end_aborted)
    # Only those outside of the gate, which catches all others.
    app.add_exception_handler(Exception, _fail)
    # The last one added is the first to see a request.
    app.add_middleware(AccessMiddleware, lifecycle=lifecycle, admission=admission, access=access)
    allow_origins(app, settings)
    app.add_middleware(RequestMiddleware, lifecycle=lifecycle, metrics=metrics, frontend=frontend)
    return app


async def _raise_server_error(request: Request, error: Exception) -> Response:
    """Turn the framework's own errors into ours; the middleware answers with the envelope."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {describe(request.url.path)}"
    if error.status_code == 404:
        raise RouteNotFoundError(f"There is no route {where}.")
    if error.status_code == 405:
        # Of all routes of the path; the framework knows the methods of its first one.
        matching = (r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE)
        methods = {method for route in matching for method in getattr(route, "methods", ())}
        allow = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        raise MethodNotAllowedError(
            f"{where} is not allowed; this path takes {allow}.", headers={"allow": allow}
        )
    raise RequestError(str(error.detail))


async def _fail(request: Request, _error: Exception) -> Response:
    """Answer a failure of a middleware; the framework then raises it, and uvicorn logs it."""
    error = InternalError("Internal error.")
    ids = {"x-request-id": get_request_id(request.scope["headers"])}
    return Response(error.body(), error.status, ids, JSON_TYPE)


async def _end_aborted(request: Request, _error: Exception) -> Response:
    """End a request whose client has gone, for the log and the metrics alone."""
    get_record(request.scope).outcome = "aborted"
    return Response(status_code=CLIENT_GONE)
