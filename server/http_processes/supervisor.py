"""Starts the HTTP processes, restarts those that end, and sends them the phase of the service.

Invariant: a process that ended leaves nothing: its counts are zeroed and its requests aborted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.context import ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.engine.process import HTTP_PROCESS, forkserver_address
from server.frontend import LaunchError
from server.host.shared_table import SharedTable
from server.host.tasks import in_thread
from server.http.connections import Connections
from server.http.listener import HttpServer, http_config, serve_http
from server.http_processes.application import ForwardedApp
from server.http_processes.messages import Channel, Message, Note, ProcessWork
from server.http_processes.process import InFlightElsewhere, run_http_process
from server.key_limits.counts import LimitCounts, SharedCounts
from server.lifecycle import Lifecycle, RequestsElsewhere, ServicePhase, Standing
from server.observability.metrics import ServerMetrics
from server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from server.http_processes.engine_clients import MakeClient
    from server.vllm.engine_client import EngineClient

logger = logging.getLogger(__name__)

_PROCESSES: Mapping[str, type[BaseProcess]] = {
    "forkserver": ForkServerProcess,
    "spawn": SpawnProcess,
}
_START_S = 240.0
_PUBLISH_S = 2.0
_STOP_S = 4.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 30.0
_STABLE_S = 60.0
"""Seconds after which a process that ends counts as one that ran well."""


class HttpProcesses:
    """The HTTP processes 1 to `number`; the main process is process 0."""

    def __init__(
        self, settings: ServerSettings, number: int, listener: socket.socket, run_dir: Path
    ) -> None:
        self._settings = settings
        self._listener = listener.dup()
        self._run_dir = run_dir
        self.socket_path = run_dir / "main.sock"
        self.table = SharedTable(number + 1)
        self.counts: LimitCounts = SharedCounts(self.table, 0)
        self.in_flight: RequestsElsewhere = InFlightElsewhere(self.table, 0)
        self.owner_salt = b""
        self._slots = {index: _Slot(index) for index in range(1, number + 1)}
        self._standing: Standing | None = None
        self._engine: EngineClient | None = None
        self._work: ProcessWork | None = None
        self._addresses: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._main: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None

    def attach(self, app: FastAPI, lifecycle: Lifecycle, server: HttpServer) -> None:
        """Answer the processes by `app`, and pass changes of `lifecycle` on to them.

        `server` stops accepting connections once the service is ready.
        """
        self.owner_salt = app.state.owner_salt
        # Connections of clients are counted where they end.
        connections = Connections(self._settings, ServerMetrics(self._run_dir))
        config = http_config(ForwardedApp(app), self._settings, None)
        config.lifespan = "off"
        self._main = HttpServer(config, self._settings, connections)
        self._serving = asyncio.create_task(serve_http(self._main, self._listen(), None))

        def change() -> None:
            self._publish(lifecycle.standing)
            if lifecycle.phase is ServicePhase.READY:
                server.stop_accepting()

        lifecycle.on_change = change

    def _listen(self) -> socket.socket:
        main = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The run directory belongs to this user alone.
        main.bind(str(self.socket_path))
        self.socket_path.chmod(0o600)
        main.listen(2048)
        return main

    def start_engines(self, make: MakeClient, config: VllmConfig, *, log_stats: bool) -> AsyncLLM:
        """Start the processes and the engines; return the engine client of the main process.

        Raises `LaunchError` for what several processes cannot do yet.
        """
        if config.lora_config is not None:
            raise LaunchError(
                "--api-server-count above 1 cannot be used with --enable-lora: each process would "
                "have adapters of its own",
                exit_code=2,
            )
        parallel = config.parallel_config
        if parallel.data_parallel_size_local != parallel.data_parallel_size:
            raise LaunchError(
                "--api-server-count above 1 needs all data-parallel engines on this host "
                f"({parallel.data_parallel_size_local} of {parallel.data_parallel_size} are)",
                exit_code=2,
            )
        from server.http_processes.engine_clients import start_engines

        # They import while the engines load the model.
        for slot in self._slots.values():
            slot.start(self._listener, self.table, self._settings, self._run_dir)
        engine, self._addresses = start_engines(
            config, make, self.table.processes, log_stats=log_stats
        )
        return engine

    async def begin(
        self,
        engine: EngineClient,
        args: Namespace,
        client_options: Mapping[str, Any],
    ) -> None:
        """Have the processes connect to the engines. Raises `LaunchError` if one ends."""
        from server.http_processes.engine_clients import share_queue

        share_queue(engine, self.table, 0)
        self._engine = engine
        self._work = ProcessWork(
            engine.vllm_config,
            args,
            client_options,
            self._addresses,
            self.socket_path,
            self.owner_salt,
            forkserver_address(),
        )
        for slot in self._slots.values():
            slot.connect(self._work)
        try:
            async with asyncio.timeout(_START_S):
                for slot in self._slots.values():
                    await slot.until_ready()
        except TimeoutError:
            raise LaunchError(f"an HTTP process was not ready in {_START_S:.0f} s") from None
        except EOFError:
            raise LaunchError("an HTTP process ended during start-up; see above") from None
        self._tasks = [asyncio.create_task(self._keep(slot)) for slot in self._slots.values()]

    def _publish(self, standing: Standing) -> None:
        self._standing = standing
        for slot in self._slots.values():
            slot.send(standing)

    async def count(self) -> None:
        """Have all processes write what they count; waits for them at most 2 seconds."""
        waiting = [slot.published() for slot in self._slots.values() if slot.ready]
        if waiting:
            await asyncio.wait([asyncio.ensure_future(w) for w in waiting], timeout=_PUBLISH_S)

    async def stop(self) -> None:
        """End all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(slot.stop() for slot in self._slots.values()))
        if self._main is not None and self._serving is not None:
            self._main.stop()
            await self._serving

    async def _keep(self, slot: _Slot) -> None:
        """Follow one process and replace it whenever it ends."""
        delay_s = _FIRST_DELAY_S
        while True:
            if self._standing is not None:
                slot.send(self._standing)
            await slot.follow()
            logger.error("%s ended with exit code %s: restarting it", slot.name, slot.exit_code())
            if time.monotonic() - slot.started > _STABLE_S:
                delay_s = _FIRST_DELAY_S
            await self._clean_up(slot.index)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            await self._restart(slot)

    async def _restart(self, slot: _Slot) -> None:
        assert self._work is not None
        settings, folder = self._settings, self._run_dir
        try:
            await in_thread(lambda: slot.start(self._listener, self.table, settings, folder))
            slot.connect(self._work)
            async with asyncio.timeout(_START_S):
                await slot.until_ready()
            logger.info("%s answers again", slot.name)
        except (EOFError, TimeoutError, OSError):
            # `follow` notices its end.
            slot.kill()
        # Again, for requests that reached an engine after their process had ended.
        await self._abort(slot.index)

    async def _clean_up(self, index: int) -> None:
        self.table.clear(index)
        await self._abort(index)

    async def _abort(self, index: int) -> None:
        from server.http_processes.engine_clients import end_requests_of

        assert self._engine is not None
        # A dead engine ends the whole service.
        with suppress(Exception):
            await end_requests_of(self._engine, index)


class _Slot:
    """Place of one process, and the process that has it now."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"{HTTP_PROCESS}{index}"
        self.started = 0.0
        self.ready = False
        self._process: BaseProcess | None = None
        self._pipe: Any = None
        self._channel: Channel | None = None
        self._published: asyncio.Event = asyncio.Event()

    def start(
        self, listener: socket.socket, table: SharedTable, settings: ServerSettings, folder: Path
    ) -> None:
        """Start the process; it imports and waits."""
        ours, theirs = Pipe()
        process = _PROCESSES[settings.engine_start](
            target=run_http_process,
            args=(theirs, listener, table, self.index, settings, folder),
            name=self.name,
        )
        process.start()
        theirs.close()
        self._process, self._pipe = process, ours
        self.started, self.ready = time.monotonic(), False

    def connect(self, work: ProcessWork) -> None:
        """Send the process its work."""
        self._channel = Channel(self._pipe)
        self._channel.send(work)

    async def until_ready(self) -> None:
        """Wait until the process can answer. Raises `EOFError` if it ends."""
        assert self._channel is not None
        while (message := await self._channel.receive()) is not Note.READY:
            if message is None:
                raise EOFError
        self.ready = True

    async def follow(self) -> None:
        """Receive messages until the process ends."""
        assert self._channel is not None
        while (message := await self._channel.receive()) is not None:
            if message is Note.PUBLISHED:
                self._published.set()
        self.ready = False
        self._published.set()
        self._channel.close()

    async def published(self) -> None:
        """Have the process write its counts, and wait for it."""
        self._published.clear()
        self.send(Note.PUBLISH)
        await self._published.wait()

    def send(self, message: Message) -> None:
        """Send a message to a process that is ready."""
        if self.ready and self._channel is not None:
            self._channel.send(message)

    def exit_code(self) -> int | None:
        """Return the exit code of a process that ends now."""
        assert self._process is not None
        self._process.join(1)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Let the process close its connections and end; kill it after 4 seconds."""
        process = self._process
        if process is None:
            return
        if self.ready:
            self.send(Note.STOP)
        else:
            process.terminate()
        await in_thread(lambda: process.join(_STOP_S))
        if process.is_alive():
            process.kill()
            await in_thread(process.join)
