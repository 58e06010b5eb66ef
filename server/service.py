"""The service from the first listen to the exit code: start, serve, drain, fail with the engine.

Invariants: a stop during start-up ends within about a second with 0; after the first signal
nothing new is admitted and what is in flight gets `drain_timeout_s`; an engine that cannot start
or dies makes the process end with 1 after `bounds.DEATH_LINGER_S` of answering 503 with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rbln_backend.api.names import ProgressReader
from server import bounds
from server.admission import Admission
from server.app import create_app
from server.frontend import EngineLauncher, Frontend, LaunchError, RunningEngine
from server.http.listener import HttpServer, Tls, http_config, serve_http
from server.http.transport import Connections
from server.lifecycle import Lifecycle
from server.observability.metrics import ServerMetrics
from server.settings import ServerSettings

logger = logging.getLogger(__name__)

_PROGRESS_PERIOD_S = 0.2
_WATCH_PERIOD_S = 0.25
_ENGINE_STOP_S = 10.0
_CUT_OFF_S = 1.0


class Service:
    """Starts the engine, watches it and shuts everything down."""

    def __init__(
        self,
        settings: ServerSettings,
        lifecycle: Lifecycle,
        admission: Admission,
        launcher: EngineLauncher,
        run_dir: Path,
        url: str,
    ) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self._admission = admission
        self._launcher = launcher
        self._progress = ProgressReader(run_dir)
        self._url = url
        self._engine: RunningEngine | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._stop_reason = "stop"
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def frontend(self) -> Frontend:
        """Return the front end; only valid once the lifecycle is ready."""
        assert self._engine is not None
        return self._engine.frontend

    def stop(self, reason: str) -> None:
        """Drain and end; a second call ends without waiting for requests in flight."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop_reason = reason
        self._stop.set()

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Run the service for as long as the application lives."""
        run = asyncio.create_task(self._run())
        run.add_done_callback(self._note_end)
        try:
            yield
        finally:
            run.cancel()
            await asyncio.wait({run})

    async def until_end(self) -> int:
        """Wait for the service's end and return the process's exit code."""
        return await self._ended

    def _note_end(self, run: asyncio.Task[int]) -> None:
        if self._ended.done() or run.cancelled():
            return
        if (error := run.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(run.result())

    async def _run(self) -> int:
        launch = asyncio.create_task(self._launcher.launch())
        stop = asyncio.create_task(self._stop.wait())
        follow = asyncio.create_task(self._follow_progress())
        try:
            await asyncio.wait({launch, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                logger.info("%s during start-up: stopping", self._stop_reason)
                self._lifecycle.begin_drain(self._stop_reason)
                launch.cancel()
                await self._launcher.abandon()
                return 0
            try:
                self._engine = launch.result()
            except LaunchError as error:
                return await self._fail(error)
            self._lifecycle.observe(self._progress.poll())
            return await self._serve(self._engine, stop)
        finally:
            for task in (launch, stop, follow):
                task.cancel()

    async def _fail(self, error: LaunchError) -> int:
        logger.error("start-up failed: %s", error)
        self._lifecycle.mark_dead(str(error))
        if error.exit_code == 1:
            # Probes can read the reason; a wrong flag exits at once.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), bounds.DEATH_LINGER_S)
        return error.exit_code

    async def _serve(self, engine: RunningEngine, stop: asyncio.Task[bool]) -> int:
        models = ", ".join(str(card["id"]) for card in await engine.frontend.models())
        self._admission.open(engine.frontend.capacity)
        self._lifecycle.mark_ready()
        if (ready_after_s := self._lifecycle.ready_after_s) is not None:
            self._launcher.keep_ready_s(ready_after_s)
        logger.info(
            "ready: %s serves %s after %.1f s",
            self._url,
            models or "no API (--headless)",
            ready_after_s,
        )
        death = asyncio.create_task(self._watch(engine))
        try:
            await asyncio.wait({death, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not death.done():
                await self._drain(death)
            if death.done() and not (self._stop.is_set() and not self._lifecycle.in_flight):
                return await self._die(death.result())
            await self._cut_off()
            await self._end(engine)
            logger.info("stopped")
            return 0
        finally:
            death.cancel()

    async def _drain(self, death: asyncio.Task[str]) -> None:
        timeout_s = self._settings.drain_timeout_s
        logger.info(
            "%s: draining %d requests, at most %g s",
            self._stop_reason,
            self._lifecycle.in_flight,
            timeout_s,
        )
        self._lifecycle.begin_drain(self._stop_reason)
        idle = asyncio.create_task(self._lifecycle.wait_idle(timeout_s))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({idle, hurry, death}, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        hurry.cancel()

    async def _cut_off(self) -> None:
        """End the requests in flight, each with an error that states the reason."""
        if self._lifecycle.in_flight:
            logger.warning("%d requests are cut off", self._lifecycle.in_flight)
            self._lifecycle.cut_off()
            await self._lifecycle.wait_idle(_CUT_OFF_S)

    async def _end(self, engine: RunningEngine) -> None:
        """Shut the engine down; a second signal kills it."""
        end = asyncio.create_task(engine.shutdown(_ENGINE_STOP_S))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({end, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not end.done():
            engine.kill()
            # The exit of the process ends any slower clean-up.
            await asyncio.wait({end}, timeout=_CUT_OFF_S)

    async def _die(self, reason: str) -> int:
        logger.error("%s: exiting with 1; its own messages above say why", reason)
        self._lifecycle.mark_dead(reason)
        # Probes and waiting clients can read the reason before the port closes.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), bounds.DEATH_LINGER_S)
        await self._cut_off()
        await self._launcher.abandon()
        return 1

    async def _watch(self, engine: RunningEngine) -> str:
        """Return the reason once the engine is dead."""
        while (reason := engine.failure()) is None:  # noqa: ASYNC110 (a process has no event)
            await asyncio.sleep(_WATCH_PERIOD_S)
        return reason

    async def _follow_progress(self) -> None:
        while self._lifecycle.starting:
            self._lifecycle.observe(self._progress.poll())
            await asyncio.sleep(_PROGRESS_PERIOD_S)


def _publish_url(settings: ServerSettings, listener: socket.socket, run_dir: Path) -> str:
    """Write the URL for programs on this host to the run directory; return the one for the log."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    scheme = "https" if settings.ssl_certfile else "http"
    host = "localhost" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104
    address = listener.getsockname()
    (run_dir / "url").write_text(local_url(scheme, address), encoding="ascii")
    return f"{scheme}://{host}:{address[1]}"


def local_url(scheme: str, address: tuple[Any, ...]) -> str:
    """Return the URL of a socket bound to `address`, for programs on this host."""
    host, port = address[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"{scheme}://[{local}]:{port}" if ":" in local else f"{scheme}://{local}:{port}"


def _warn_if_open(settings: ServerSettings) -> None:
    """Log the operations that are open to any client of a server without keys."""
    if settings.listens_locally or settings.api_key or settings.api_key_file is not None:
        return
    changes = settings.allow_unguarded_changes and not (
        settings.admin_key or settings.admin_key_file is not None
    )
    logger.warning(
        "NO API KEY: whoever reaches %s:%d may use the model and read /metrics and "
        "/v1/server_info%s. --api-key-file (or RBLN_SERVE_API_KEY) closes that, --host 127.0.0.1 "
        "keeps other hosts out%s",
        settings.host,
        settings.port,
        ", and load and unload adapters" if changes else "",
        ", --no-allow-unguarded-changes guards the adapters" if changes else "",
    )


async def serve(
    settings: ServerSettings,
    launcher: EngineLauncher,
    listener: socket.socket,
    run_dir: Path,
    started_at: float,
) -> int:
    """Serve on a bound socket until the end and return the exit code.

    `started_at` is the process start on `time.monotonic`'s clock.
    """
    lifecycle = Lifecycle(started_at, launcher.expected_s())
    admission = Admission(settings.max_in_flight)
    metrics = ServerMetrics(run_dir)
    metrics.set_versions(launcher.versions())
    url = _publish_url(settings, listener, run_dir)
    service = Service(settings, lifecycle, admission, launcher, run_dir, url)
    app = create_app(
        settings,
        lifecycle,
        admission,
        metrics,
        service.frontend,
        launcher.versions(),
        run_dir,
        service.background,
    )
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # `nohup` has SIGHUP ignored.
        if signal.getsignal(name) is not signal.SIG_IGN:
            loop.add_signal_handler(name, service.stop, name.name)
    tls = Tls(settings) if settings.ssl_certfile else None
    connections = Connections(settings, metrics)
    server = HttpServer(http_config(app, settings, tls), settings, connections)
    http = asyncio.create_task(serve_http(server, listener, tls))
    _warn_if_open(settings)
    eta_s = lifecycle.eta_s
    logger.info(
        "listening on %s after %.2f s; starting the engine%s",
        url,
        lifecycle.uptime_s,
        "" if eta_s is None else f", ready in about {eta_s:.0f} s",
    )
    end = asyncio.create_task(service.until_end())
    # The HTTP side ends first only when it could not start.
    await asyncio.wait({end, http}, return_when=asyncio.FIRST_COMPLETED)
    server.stop()
    await http
    return end.result() if end.done() else 1
