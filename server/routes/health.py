"""Liveness, readiness and startup probes, and the versions.

`/livez` fails only if a restart would help; `/readyz` is 200 while new requests are accepted;
`/startupz` is 200 once the service has been ready; `/health` is vLLM's probe: 200 while the engine
can answer, 503 during start-up and after an engine failure; `/ping` is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from server.http.openapi import DescribedRoute
from server.lifecycle import Lifecycle, ServicePhase, ServiceStatus

_PROBE: Any = {"response_model": ServiceStatus, "responses": {503: {"model": ServiceStatus}}}


def health_router(lifecycle: Lifecycle, versions: Mapping[str, str]) -> APIRouter:
    """Return the probes' routes."""
    router = APIRouter(route_class=DescribedRoute)

    def report(healthy: bool) -> JSONResponse:
        headers = {} if healthy else {"retry-after": str(lifecycle.retry_after_s())}
        status = 200 if healthy else 503
        return JSONResponse(lifecycle.status(), status_code=status, headers=headers)

    @router.get("/livez", **_PROBE)
    async def livez() -> JSONResponse:
        """Liveness: 503 if a restart would help."""
        return report(lifecycle.phase is not ServicePhase.DEAD)

    @router.get("/readyz", **_PROBE)
    async def readyz() -> JSONResponse:
        """Readiness: 200 while new requests are accepted; includes the start-up progress."""
        return report(lifecycle.phase is ServicePhase.READY)

    @router.get("/startupz", **_PROBE)
    async def startupz() -> JSONResponse:
        """Startup: 200 once the service has been ready."""
        return report(lifecycle.started and lifecycle.phase is not ServicePhase.DEAD)

    @router.get("/health", response_class=Response, responses={503: {}})
    async def health() -> Response:
        """vLLM's health check: 200 while the engine can answer."""
        return Response(status_code=200 if lifecycle.phase is ServicePhase.READY else 503)

    @router.get("/ping", response_class=Response, responses={503: {}})
    @router.post("/ping", response_class=Response, responses={503: {}})
    async def ping() -> Response:
        """The health check of SageMaker and of other hosts of containers: as `/health`."""
        return await health()

    @router.get("/version", response_model=Mapping[str, str])
    async def version() -> JSONResponse:
        """Versions of the components."""
        return JSONResponse(dict(versions))

    return router
