"""The ASGI application: routes, the middleware around them, errors as envelopes.

Importing this module loads no torch, vllm or transformers: the process listens before they do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from server.errors import MethodNotAllowedError, RequestError, RouteNotFoundError, describe
from server.frontend import Frontend
from server.lifecycle import Lifecycle
from server.middleware import EdgeMiddleware, GateMiddleware
from server.observability.metrics import ServerMetrics
from server.routes.health import health_router
from server.routes.inference import add_inference_routes
from server.routes.metrics import metrics_router
from server.routes.models import models_router
from server.routes.server_info import server_info_router
from server.settings import ServerSettings


def create_app(
    settings: ServerSettings,
    lifecycle: Lifecycle,
    metrics: ServerMetrics,
    frontend: Callable[[], Frontend],
    versions: Mapping[str, str],
    run_dir: Path,
    background: Callable[[], AbstractAsyncContextManager[None]],
) -> FastAPI:
    """Build the application.

    `frontend` is only called once `lifecycle` is ready. The engine describes itself in `run_dir`.
    `background` is entered before the first request and left after the last: what brings the
    service up runs in it.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with background():
            yield

    app = FastAPI(title="rbln-serve", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.include_router(health_router(lifecycle, versions))
    app.include_router(metrics_router(metrics, lifecycle))
    app.include_router(server_info_router(settings, lifecycle, versions, run_dir))
    app.include_router(models_router(frontend))
    add_inference_routes(app, frontend, settings)
    app.add_exception_handler(HTTPException, _raise_ours)
    # The last one added is the first to see a request.
    app.add_middleware(GateMiddleware, lifecycle=lifecycle)
    app.add_middleware(EdgeMiddleware, lifecycle=lifecycle, metrics=metrics)
    return app


async def _raise_ours(request: Request, error: Exception) -> Response:
    """Turn the framework's own errors into ours; the middleware answers with the envelope."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {describe(request.url.path)}"
    if error.status_code == 404:
        raise RouteNotFoundError(f"There is no route {where}.")
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        raise MethodNotAllowedError(
            f"{where} is not allowed; this path takes {allow}.", headers={"allow": allow}
        )
    raise RequestError(str(error.detail))
