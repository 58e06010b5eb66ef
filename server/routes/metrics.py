"""`/metrics`: the server's, vLLM's and the engine processes' metrics on one page."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from server.lifecycle import Lifecycle
from server.observability.metrics import CONTENT_TYPE, ServerMetrics


def metrics_router(metrics: ServerMetrics, lifecycle: Lifecycle) -> APIRouter:
    """Return the route of the metrics page."""
    router = APIRouter()

    @router.get("/metrics")
    async def page() -> Response:
        metrics.observe_lifecycle(lifecycle)
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return router
