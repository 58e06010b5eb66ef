"""One HTTP process: an engine client and a server on the shared socket."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from server.engine.process import use_forkserver
from server.frontend import LaunchError
from server.host.shared_table import ALL, CountField, SharedTable
from server.http_processes.messages import Channel, Note, ProcessWork
from server.lifecycle import Lifecycle, ServicePhase, Standing
from server.settings import ServerSettings

if TYPE_CHECKING:
    from server.admission import Admission
    from server.http.listener import HttpServer
    from server.observability.metrics import ServerMetrics
    from server.vllm.engine_client import EngineClient
    from server.vllm.frontend import VllmFrontend

logger = logging.getLogger(__name__)

_SWITCH_S = 0.001


def run_http_process(
    pipe: Connection,
    listener: socket.socket,
    table: SharedTable,
    index: int,
    settings: ServerSettings,
    run_dir: Path,
) -> None:
    """Serve as process `index` until the main process says stop or ends."""
    import setproctitle

    from rbln_backend.host.process_life import outlive_readers
    from server.host.importing import without_garbage_collection
    from server.observability.logging import configure
    from server.observability.process_metrics import count_in_files
    from server.observability.vllm_log import bound_vllm_log

    outlive_readers()
    # A terminal's signals reach every process; the main process ends this one.
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    setproctitle.setproctitle(f"rbln-serve: HTTP process {index}")
    configure(settings.log_level, settings.log_format)
    count_in_files(run_dir)
    with without_garbage_collection():
        from server.vllm.importing import allow_stop_strings, import_serving

        allow_stop_strings(settings.max_stop)
        import_serving()
        import uvloop

        import server.http_processes.application
        import server.http_processes.engine_clients  # noqa: F401
    try:
        work = pipe.recv()
    except EOFError:
        return
    assert isinstance(work, ProcessWork)
    use_forkserver(work.forkserver)
    try:
        engine = _connect(work, index, settings)
    except LaunchError as error:
        logger.error("%s", error)
        return
    bound_vllm_log()
    sys.setswitchinterval(_SWITCH_S)
    process = _HttpProcess(work, engine, table, index, settings, run_dir)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(process.serve(pipe, listener))
        # Threads that start or follow other processes would delay the end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _connect(work: ProcessWork, index: int, settings: ServerSettings) -> EngineClient:
    from server.engine.outputs import install_output_processor
    from server.engine.socket import receive_directly
    from server.engine.step_stats import defer_stats
    from server.http_processes.engine_clients import connect_client
    from server.vllm.engine_client import EngineClient

    make = partial(EngineClient.from_vllm_config, work.config, **work.client_options)
    engine = connect_client(work.config, make, work.addresses, index)
    assert isinstance(engine, EngineClient)
    defer_stats(engine)
    receive_directly(engine)
    install_output_processor(engine, settings.max_queue_s, logs_deltas=work.args.enable_log_outputs)
    return engine


class InFlightElsewhere:
    """Requests in flight of the other processes, in the shared table."""

    def __init__(self, table: SharedTable, process: int) -> None:
        self._table = table
        self._process = process

    def count(self) -> int:
        """Return their number; of an HTTP process 0: it drains its own requests."""
        if self._process:
            return 0
        return int(self._table.total(ALL, CountField.REQUESTS, but=0))

    def changed(self, own: int) -> None:
        """Publish the number of this process."""
        self._table.put(self._process, ALL, CountField.REQUESTS, own)


class _HttpProcess:
    """The service of one process. Used from the event loop only, after its construction."""

    def __init__(
        self,
        work: ProcessWork,
        engine: EngineClient,
        table: SharedTable,
        index: int,
        settings: ServerSettings,
        run_dir: Path,
    ) -> None:
        self._work = work
        self._engine = engine
        self._table = table
        self._index = index
        self._settings = settings
        self._run_dir = run_dir
        self._frontend: VllmFrontend | None = None
        self._lifecycle = Lifecycle(time.monotonic(), elsewhere=InFlightElsewhere(table, index))

    async def serve(self, pipe: Connection, listener: socket.socket) -> None:
        """Serve until the main process says stop or ends."""
        from server.admission import Admission
        from server.http_processes.engine_clients import share_queue, stopping, until_connected
        from server.key_limits.counts import SharedCounts
        from server.observability.metrics import ServerMetrics
        from server.vllm.frontend import build_frontend

        engine, settings = self._engine, self._settings
        async with stopping(engine):
            await until_connected(engine)
            share_queue(engine, self._table, self._index)
            tasks = await engine.get_supported_tasks()
            self._frontend = await build_frontend(engine, self._work.args, tasks, settings)
            warming = asyncio.ensure_future(self._frontend.warm_up())
            counts = SharedCounts(self._table, self._index)
            admission = Admission(settings.max_in_flight, counts=counts)
            admission.open(self._frontend.capacity)
            metrics = ServerMetrics(self._run_dir)
            channel = Channel(pipe)
            channel.send(Note.READY)
            await self._follow(channel, listener, admission, metrics)
            warming.cancel()

    async def _follow(
        self,
        channel: Channel,
        listener: socket.socket,
        admission: Admission,
        metrics: ServerMetrics,
    ) -> None:
        """Obey the main process; listen once the service is ready."""
        server: HttpServer | None = None
        http: asyncio.Task[None] | None = None
        while (message := await channel.receive()) is not None and message is not Note.STOP:
            if message is Note.PUBLISH:
                self._publish(metrics)
                channel.send(Note.PUBLISHED)
            elif isinstance(message, Standing):
                self._lifecycle.follow(message)
                if server is None and message.phase >= ServicePhase.READY:
                    server, http = self._listen(listener, admission, metrics)
        if server is not None and http is not None:
            server.stop()
            with suppress(TimeoutError):
                await asyncio.wait_for(http, 2)

    def _publish(self, metrics: ServerMetrics) -> None:
        frontend = self._ready_frontend()
        metrics.observe_reading(frontend.take_reading())
        if frontend.grammars is not None:
            metrics.observe_grammars(frontend.grammars.take_counts())

    def _ready_frontend(self) -> VllmFrontend:
        assert self._frontend is not None
        return self._frontend

    def _listen(
        self, listener: socket.socket, admission: Admission, metrics: ServerMetrics
    ) -> tuple[HttpServer, asyncio.Task[None]]:
        import httpx

        from server.http.connections import Connections
        from server.http.listener import HttpServer, http_config, serve_http
        from server.http.tls import Tls
        from server.http_processes.application import (
            ForwardingApp,
            answered_here,
            create_inference_app,
        )

        settings = self._settings
        app = create_inference_app(
            settings,
            self._lifecycle,
            admission,
            metrics,
            self._ready_frontend,
            self._work.owner_salt,
        )
        limits = httpx.Limits(max_connections=None, keepalive_expiry=30)
        transport = httpx.AsyncHTTPTransport(uds=str(self._work.main), limits=limits)
        main = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)
        here = answered_here(stores=settings.data_dir is not None)
        tls = Tls(settings) if settings.ssl_certfile else None
        connections = Connections(settings, metrics, admission.counts)
        config = http_config(ForwardingApp(app, here, main), settings, tls)
        server = HttpServer(config, settings, connections, shares=True)
        return server, asyncio.create_task(serve_http(server, listener, tls))
