"""The probes of a server of several models: its own state, and the progress of each model."""

from __future__ import annotations

import time
from collections.abc import Mapping

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from server.http.openapi import DescribedRoute
from server.lifecycle import Lifecycle, ServicePhase
from server.model_pool.pool import ModelPool
from server.model_pool.pooled_model import ModelState, PooledModel
from server.wire.endpoint import JsonObject


def probes_router(lifecycle: Lifecycle, pool: ModelPool, versions: Mapping[str, str]) -> APIRouter:
    """Return the probes' routes, the versions and the load."""
    router = APIRouter(route_class=DescribedRoute)

    def report(healthy: bool) -> JSONResponse:
        headers = {} if healthy else {"retry-after": str(lifecycle.retry_after_s())}
        models = {name: model_status(pool, model) for name, model in pool.models.items()}
        memory = {"held_bytes": pool.held_bytes, "budget_bytes": pool.budget_bytes}
        body = {**lifecycle.status(), "models": models, "memory": memory}
        return JSONResponse(body, status_code=200 if healthy else 503, headers=headers)

    @router.get("/livez")
    async def livez() -> JSONResponse:
        """Liveness: 503 if a restart would help."""
        return report(lifecycle.phase is not ServicePhase.DEAD)

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """Readiness: 200 while new requests are accepted; includes each model's progress."""
        return report(lifecycle.phase is ServicePhase.READY)

    @router.get("/startupz")
    async def startupz() -> JSONResponse:
        """Startup: 200 once the pinned models were loaded."""
        return report(lifecycle.started and lifecycle.phase is not ServicePhase.DEAD)

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        """vLLM's health check: 200 while requests are accepted."""
        return Response(status_code=200 if lifecycle.phase is ServicePhase.READY else 503)

    @router.get("/version")
    async def version() -> JSONResponse:
        """Versions of the components."""
        return JSONResponse(dict(versions))

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of requests in flight, as vLLM's `server_load`."""
        return {"server_load": lifecycle.in_flight}

    return router


def model_status(pool: ModelPool, model: PooledModel) -> JsonObject:
    """Return the state of one model; a model that is loaded now reports its own progress."""
    process = model.process
    status: JsonObject = {
        "state": model.state.value,
        "pinned": model.entry.pinned,
        "in_flight": model.in_flight,
        "waiting": model.waiting,
        "loads": model.loads,
        "load_s": None if model.load_s is None else round(model.load_s, 3),
        "memory_bytes": model.held_bytes,
        "reason": model.reason,
    }
    if model.state is ModelState.LOADING:
        started = {} if process is None else process.status
        status["phase"] = started.get("phase", "init")
        status["graphs"] = started.get("graphs", {"done": 0, "total": 0})
    if model.state is not ModelState.READY and (model.wanted or process is not None):
        status["eta_s"] = round(pool.eta_s(model), 1)
    if model.state is ModelState.READY:
        status["idle_s"] = 0.0 if model.in_flight else round(time.monotonic() - model.used_at, 3)
    return status
