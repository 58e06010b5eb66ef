"""`/metrics` of a server of several models: the models' pages, and the front process's own."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import httpx
from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from server.http.openapi import DescribedRoute
from server.model_pool.front.metrics_page import (
    Families,
    add_counts,
    gauge,
    join_pages,
    parse_page,
    quoted,
    render_page,
)
from server.model_pool.model_process import ModelProcess
from server.model_pool.pool import ModelPool
from server.model_pool.pooled_model import ModelState, PooledModel
from server.observability.metrics import CONTENT_TYPE, ServerMetrics

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_FRONT = (
    *("rbln_http_connections", "rbln_http_connection_refusals_total"),
    *("rbln_http_requests_total", "rbln_http_request_seconds", "rbln_serve_build_info"),
)
"""Metrics of the front process that are on the page."""
_FRONT_ALONE = ("rbln_http_connections", "rbln_http_connection_refusals_total")
"""Metrics that count the front process's own connections in a model's process."""

_LOADED = (ModelState.READY, ModelState.LEAVING)


class _ReadPage(NamedTuple):
    """The page of a process, as it was last read."""

    process: ModelProcess
    page: Families


class FrontMetrics:
    """Reads the pages of the models' processes, and keeps the counts of those that have ended."""

    def __init__(self, pool: ModelPool, metrics: ServerMetrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self._ended: dict[str, Families] = {name: {} for name in pool.models}
        self._latest: dict[str, _ReadPage] = {}
        pool.before_stop.append(self._keep)

    async def page(self) -> str:
        """Return the whole page."""
        models = self._pool.models.values()
        pages = await asyncio.gather(*(self._page_of(model) for model in models))
        page = (await asyncio.to_thread(self._metrics.render)).decode()
        own = {name: f for name, f in parse_page(page, "").items() if name in _FRONT}
        return render_page(join_pages([*self._of_pool(), own, *pages]))

    async def _page_of(self, model: PooledModel) -> Families:
        """Return the model's counts of all its processes, and the gauges of the running one."""
        live = {}
        process = model.process
        if process is not None and model.state in _LOADED:
            live = await self._read(model, process)
            # Not of a process that ends meanwhile: its last counts are read by themselves.
            if live and model.process is process and model.state in _LOADED:
                self._keep_of_killed(model)
                self._latest[model.name] = _ReadPage(process, live)
        else:
            self._keep_of_killed(model)
        return join_pages([live, self._ended[model.name]])

    def _keep_of_killed(self, model: PooledModel) -> None:
        """Keep the counts that were last read of a process that ended by itself."""
        latest = self._latest.get(model.name)
        if latest is not None and latest.process is not model.process:
            add_counts(self._ended[model.name], self._latest.pop(model.name).page)

    async def _read(self, model: PooledModel, process: ModelProcess) -> Families:
        try:
            answer = await process.client.get("/metrics", timeout=_TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning("the metrics of the model %s cannot be read: %r", model.name, error)
            return {}
        page = await asyncio.to_thread(parse_page, answer.text, model.name)
        return {name: family for name, family in page.items() if name not in _FRONT_ALONE}

    async def _keep(self, model: PooledModel) -> None:
        """Keep the counts of a process that is about to end; the last ones if it cannot answer."""
        assert model.process is not None
        self._keep_of_killed(model)
        read = await self._read(model, model.process)
        latest = self._latest.pop(model.name, None)
        if not read and latest is not None:
            read = latest.page
        add_counts(self._ended[model.name], read)

    def _of_pool(self) -> list[Families]:
        """Return the metrics of the models' states."""
        models = self._pool.models
        label = {name: f"model_name={quoted(name)}" for name in models}
        return [
            gauge(
                "rbln_model_state",
                "1 for the state of a model: asleep, loading, ready, leaving or stopping.",
                {
                    f'{label[name]},state="{state.value}"': float(model.state is state)
                    for name, model in models.items()
                    for state in ModelState
                },
            ),
            gauge(
                "rbln_model_memory_bytes",
                "Memory of a model that is not asleep.",
                {label[name]: float(model.held_bytes) for name, model in models.items()},
            ),
            gauge(
                "rbln_model_memory_budget_bytes",
                "Memory that the loaded models share.",
                {"": float(self._pool.budget_bytes)},
            ),
            gauge(
                "rbln_model_waiting_requests",
                "Requests that wait for a model to be loaded.",
                {label[name]: float(model.waiting) for name, model in models.items()},
            ),
            gauge(
                "rbln_model_load_seconds",
                "Seconds of the last load of a model.",
                {label[n]: m.load_s for n, m in models.items() if m.load_s is not None},
            ),
            gauge(
                "rbln_model_loads_total",
                "Loads of a model since the start.",
                {label[name]: float(model.loads) for name, model in models.items()},
                kind="counter",
            ),
        ]


def front_metrics_router(front: FrontMetrics) -> APIRouter:
    """Return the route of the metrics page."""
    router = APIRouter(route_class=DescribedRoute)
    one_at_a_time = asyncio.Lock()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def page() -> Response:
        """Return the metrics of all models in Prometheus' text format."""
        async with one_at_a_time:
            return Response(await front.page(), media_type=CONTENT_TYPE)

    return router
