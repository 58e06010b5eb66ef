"""Probes: is the process alive, is the service ready, has it started, what runs.

`/livez` fails only when a restart would help; `/readyz` is 200 exactly while new requests are
taken; `/startupz` turns 200 once and stays; `/health` is 200 while the engine can answer, as
vLLM's is, and 503 where vLLM would not listen yet or answer from a dying engine.
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
        """Whether the process would not be helped by a restart."""
        return report(lifecycle.phase is not ServicePhase.DEAD)

    @router.get("/readyz", **_PROBE)
    async def readyz() -> JSONResponse:
        """Whether new requests are taken now; with the progress of the start-up."""
        return report(lifecycle.phase is ServicePhase.READY)

    @router.get("/startupz", **_PROBE)
    async def startupz() -> JSONResponse:
        """Whether the service has been ready once."""
        return report(lifecycle.started and lifecycle.phase is not ServicePhase.DEAD)

    @router.get("/health", response_class=Response, responses={503: {}})
    async def health() -> Response:
        """Whether the engine can answer, as vLLM says it."""
        return Response(status_code=200 if lifecycle.phase is ServicePhase.READY else 503)

    @router.get("/version", response_model=Mapping[str, str])
    async def version() -> JSONResponse:
        """Versions of what runs."""
        return JSONResponse(dict(versions))

    return router
