"""Probes, versions and metrics.

`/livez` fails only if a restart would help; `/readyz` is 200 while new requests are accepted;
`/startupz` is 200 once the service has been ready; `/health` is vLLM's probe: 200 while the engine
can answer, 503 during start-up and after an engine failure; `/ping` is the same. `/metrics` has the
metrics of the server, of vLLM and of the engine processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from server.admission import Admission
from server.frontend import Frontend
from server.http.openapi import DescribedRoute
from server.lifecycle import Lifecycle, ServicePhase, ServiceStatus
from server.observability.metrics import CONTENT_TYPE, ServerMetrics
from server.observability.traffic import BucketAdvice
from server.settings import ServerSettings
from server.storage.services import StorageServices

_PROBE: Any = {"response_model": ServiceStatus, "responses": {503: {"model": ServiceStatus}}}


def health_router(lifecycle: Lifecycle, versions: Mapping[str, str]) -> APIRouter:
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


def metrics_router(
    metrics: ServerMetrics,
    settings: ServerSettings,
    lifecycle: Lifecycle,
    admission: Admission,
    frontend: Callable[[], Frontend],
    advice: BucketAdvice,
    storage: StorageServices,
) -> APIRouter:
    router = APIRouter(route_class=DescribedRoute)
    one_at_a_time = asyncio.Lock()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def page() -> Response:
        """Return the metrics in Prometheus' text format."""
        latest = await advice.latest()
        async with one_at_a_time:
            metrics.observe_service(lifecycle, admission, settings)
            if lifecycle.started:
                running = frontend()
                if running.adapters is not None:
                    metrics.observe_adapters(running.adapters)
                reading = running.take_reading()
                metrics.add_jobs(reading, "rbln_large_bodies_total", "rbln_large_body_seconds")
                if running.grammars is not None:
                    checks = running.grammars.take_counts()
                    metrics.add_jobs(
                        checks, "rbln_grammar_checks_total", "rbln_grammar_compile_seconds"
                    )
            if (batches := storage.batches) is not None:
                for status, count in batches.statuses.items():
                    metrics.set("rbln_batches", count, status)
                for name, value in batches.gauges().items():
                    metrics.set(name, value)
                lines, tokens = batches.take_counts()
                for result, count in lines.items():
                    metrics.count("rbln_batch_lines_total", result, by=count)
                for kind, count in tokens.items():
                    metrics.count("rbln_batch_tokens_total", kind, by=count)
            if storage.responses is not None:
                for status, count in storage.responses.statuses.items():
                    metrics.set("rbln_stored_responses", count, status)
            metrics.observe_advice(latest)
            # Takes many milliseconds, so it runs in a thread.
            text = await asyncio.to_thread(metrics.render)
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of requests in flight, as vLLM's `server_load`."""
        return {"server_load": lifecycle.in_flight}

    return router
