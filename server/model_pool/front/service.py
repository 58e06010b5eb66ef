"""The front process from the first listen to the exit code.

Invariants: no request is admitted after the first stop signal; models' processes end with it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from server.host.tasks import background_task
from server.http.connections import Connections
from server.http.listener import HttpServer, http_config, serve_http
from server.http.tls import Tls
from server.lifecycle import Lifecycle, ServicePhase
from server.model_pool.choice.stored_objects import StoredObjects
from server.model_pool.front.app import create_front_app
from server.model_pool.pool import ModelPool
from server.model_pool.pooled_model import ModelState
from server.observability.metrics import ServerMetrics
from server.service import publish_url, stop_signals, warn_if_open
from server.settings import ServerSettings, SettingsError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_WORK_PERIOD_S = 2.0

Prepare = Callable[[], Awaitable[None]]


class FrontService:
    """Loads the pinned models, serves, drains and ends."""

    def __init__(
        self, settings: ServerSettings, lifecycle: Lifecycle, pool: ModelPool, prepare: Prepare
    ) -> None:
        """`prepare` is awaited first; it raises `SettingsError` for models that cannot run."""
        self._settings = settings
        self._lifecycle = lifecycle
        self._pool = pool
        self._prepare = prepare
        self._prepared = asyncio.Event()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reason = "stop"

    async def follow_work(self, stored: StoredObjects) -> None:
        """Load models whose batches or background responses wait; never returns."""
        while True:
            await asyncio.sleep(_WORK_PERIOD_S)
            if self._lifecycle.phase is ServicePhase.READY:
                self._pool.work_on(await stored.with_pending_work())

    def stop(self, reason: str) -> None:
        """Drain and end; a second call ends without waiting for requests in flight."""
        if self._stop.is_set():
            self._hurry.set()
        self._reason = reason
        self._stop.set()

    async def run(self, url: str) -> int:
        """Serve until the end and return the exit code."""
        pool = asyncio.create_task(self._run_pool())
        stop = asyncio.create_task(self._stop.wait())
        start = asyncio.create_task(self._begin(url))
        try:
            await asyncio.wait({start, stop, pool}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()
                await asyncio.wait({stop, pool}, return_when=asyncio.FIRST_COMPLETED)
            if pool.done():
                pool.result()
            await self._drain()
            return 0
        except SettingsError as error:
            logger.error("start-up failed: %s", error)
            return 1
        finally:
            for task in (pool, stop, start):
                task.cancel()
            await self._pool.close()
            logger.info("stopped")

    async def _run_pool(self) -> None:
        """Load models once their memory is known."""
        await self._prepared.wait()
        await self._pool.run()

    async def _begin(self, url: str) -> None:
        await self._prepare()
        self._prepared.set()
        pinned = [model for model in self._pool.models.values() if model.entry.pinned]
        while not all(model.state is ModelState.READY for model in pinned):
            for model in pinned:
                if model.reason is not None:
                    raise SettingsError(f"the pinned model {model.name}: {model.reason}")
            await asyncio.sleep(_POLL_S)
        self._lifecycle.mark_ready()
        logger.info(
            "ready: %s serves %s after %.1f s",
            *(url, ", ".join(self._pool.models), self._lifecycle.ready_after_s or 0.0),
        )

    async def _drain(self) -> None:
        timeout_s = self._settings.drain_timeout_s
        count = self._lifecycle.in_flight
        logger.info("%s: draining %d requests, at most %g s", self._reason, count, timeout_s)
        self._lifecycle.begin_drain(self._reason)
        idle = asyncio.create_task(self._lifecycle.wait_idle(timeout_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({idle, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurry):
            task.cancel()
        if self._lifecycle.in_flight:
            logger.warning("%d requests are cut off", self._lifecycle.in_flight)
            self._lifecycle.cut_off()
            await self._lifecycle.wait_idle(1.0)


async def serve_front(
    settings: ServerSettings,
    pool: ModelPool,
    listener: socket.socket,
    run_dir: Path,
    started_at: float,
    versions: Mapping[str, str],
    prepare: Prepare,
) -> int:
    """Serve on a bound socket until the end and return the exit code."""
    lifecycle = Lifecycle(started_at)
    metrics = ServerMetrics(run_dir)
    metrics.set_versions(versions)
    url = publish_url(settings, listener, run_dir)
    service = FrontService(settings, lifecycle, pool, prepare)
    app = create_front_app(settings, lifecycle, pool, metrics, versions)
    loop = asyncio.get_running_loop()
    for name in stop_signals():
        loop.add_signal_handler(name, service.stop, name.name)
    tls = Tls(settings) if settings.ssl_certfile else None
    server = HttpServer(http_config(app, settings, tls), settings, Connections(settings, metrics))
    http = asyncio.create_task(serve_http(server, listener, tls))
    warn_if_open(settings)
    logger.info("listening on %s after %.2f s", url, lifecycle.uptime_s)
    end = asyncio.create_task(service.run(url))
    stored = StoredObjects(settings.data_dir, pool.models.values())
    async with background_task(service.follow_work(stored)):
        await asyncio.wait({end, http}, return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            service.stop("the HTTP server has ended")
        code = await end
    server.stop()
    await http
    return code
