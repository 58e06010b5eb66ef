"""Probes: is the process alive, is the service ready, has it started, what runs.

`/livez` fails only when a restart would help; `/readyz` is 200 exactly while new requests are
taken; `/startupz` turns 200 once and stays; `/health` is 200 while the engine can answer, as
vLLM's is, and 503 where vLLM would not listen yet or answer from a dying engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from server.lifecycle import Lifecycle, Phase


def health_router(lifecycle: Lifecycle, versions: Mapping[str, str]) -> APIRouter:
    """Return the probes' routes."""
    router = APIRouter()

    def report(healthy: bool) -> JSONResponse:
        headers = {} if healthy else {"retry-after": str(lifecycle.retry_after_s())}
        status = 200 if healthy else 503
        return JSONResponse(lifecycle.status(), status_code=status, headers=headers)

    @router.get("/livez")
    async def livez() -> JSONResponse:
        return report(lifecycle.phase is not Phase.DEAD)

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        return report(lifecycle.phase is Phase.READY)

    @router.get("/startupz")
    async def startupz() -> JSONResponse:
        return report(lifecycle.started and lifecycle.phase is not Phase.DEAD)

    @router.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if lifecycle.phase is Phase.READY else 503)

    @router.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse(dict(versions))

    return router
