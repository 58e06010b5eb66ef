"""`/metrics`: metrics of the server, of vLLM and of the engine processes; `/load`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from server.admission import Admission
from server.frontend import Frontend
from server.http.openapi import DescribedRoute
from server.lifecycle import Lifecycle
from server.observability.metrics import CONTENT_TYPE, ServerMetrics
from server.observability.traffic import BucketAdvice
from server.settings import ServerSettings
from server.storage.services import StorageServices


def metrics_router(
    metrics: ServerMetrics,
    settings: ServerSettings,
    lifecycle: Lifecycle,
    admission: Admission,
    frontend: Callable[[], Frontend],
    advice: BucketAdvice,
    storage: StorageServices,
) -> APIRouter:
    """Return the routes of the metrics page and of the load."""
    router = APIRouter(route_class=DescribedRoute)
    one_at_a_time = asyncio.Lock()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def page() -> Response:
        """Return the metrics in Prometheus' text format."""
        latest = await advice.latest()
        async with one_at_a_time:
            metrics.observe_lifecycle(lifecycle)
            metrics.observe_admission(admission, settings)
            if lifecycle.started and (adapters := frontend().adapters) is not None:
                metrics.observe_adapters(adapters)
            if lifecycle.started:
                metrics.observe_reading(frontend().take_reading())
            if lifecycle.started and (grammars := frontend().grammars) is not None:
                metrics.observe_grammars(grammars.take_counts())
            if (batches := storage.batches) is not None:
                done = batches.take_counts()
                metrics.observe_batches(batches.statuses, batches.gauges(), done.lines, done.tokens)
            if storage.responses is not None:
                metrics.observe_responses(storage.responses.statuses)
            metrics.observe_advice(latest)
            # Takes many milliseconds, so it runs in a thread.
            text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of requests in flight, as vLLM's `server_load`."""
        return {"server_load": lifecycle.in_flight}

    return router
