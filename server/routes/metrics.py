"""`/metrics`: metrics of the server, of vLLM and of the engine processes; `/load`; `/v1/usage`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from server.admission import Admission
from server.errors import InvalidValueError, StorageUnavailableError
from server.frontend import Frontend
from server.http.openapi import DescribedRoute, failing
from server.lifecycle import Lifecycle
from server.observability.bucket_advice import BucketAdvice
from server.observability.metrics import CONTENT_TYPE, ServerMetrics
from server.settings import ServerSettings
from server.storage.services import StorageServices
from server.storage.usage.device_usage import DeviceUsage
from server.storage.usage.report import UsageReport, grouping, usage_report, window_of

_START = Query(description="Begin in seconds since 1970, as of its hour; absent: 400 days ago.")
_END = Query(description="End in seconds since 1970, its hour included; absent: now.")
_BY = Query(description="Fields to divide by, of `kind`, `key`, `model` and `hour`.")


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
            await metrics.before_page()
            # Takes many milliseconds, so it runs in a thread.
            text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of requests in flight, as vLLM's `server_load`."""
        return {"server_load": lifecycle.in_flight}

    return router


def usage_router(usage: DeviceUsage) -> APIRouter:
    """Return the route; callers are authorized by the middleware."""
    router = APIRouter(route_class=DescribedRoute)

    @router.get(
        "/v1/usage",
        response_model=UsageReport,
        responses=failing(InvalidValueError, StorageUnavailableError),
    )
    async def device_time(
        start_time: Annotated[str | None, _START] = None,
        end_time: Annotated[str | None, _END] = None,
        group_by: Annotated[str, _BY] = "kind,key,model",
        key: Annotated[str | None, Query(description="Only this API key's name.")] = None,
        model: Annotated[str | None, Query(description="Only this model or adapter.")] = None,
    ) -> JSONResponse:
        """Return the device seconds of each API key and model; see docs/accounting.md."""
        fields, window = grouping(group_by), window_of(start_time, end_time, time.time())
        found = await usage.seconds(*window)
        return JSONResponse(usage_report(found, window, fields, {"key": key, "model": model}))

    return router
