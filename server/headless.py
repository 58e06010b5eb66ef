"""`--headless`: data-parallel engines of this host for the front end of another server.

A front end that has gone is noticed by the connections of the engine processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import psutil

from rbln_backend.api.names import ProgressReader
from server.admission import Capacity
from server.engine.config import launch_error
from server.engine.launch import Launcher
from server.errors import HeadlessError
from server.frontend import LaunchError, WireSchemas
from server.host.job_pool import JobCounts
from server.host.tasks import in_daemon_thread, in_thread, without_garbage_collection
from server.tools import ToolSupport
from server.wire import Endpoint, JsonObject

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.utils import CoreEngineProcManager

logger = logging.getLogger(__name__)

_LOST_AFTER = 4
_POLL_S = 0.1


class Address(NamedTuple):
    """Host and port of the other end of a TCP connection."""

    ip: str
    port: int


class FrontWatch:
    """Compares the engines' connections with all that they ever had.

    ZeroMQ connects again for ever to a front end that has gone, without an error, and a front end
    that starts again has other ports. A connection counts as lost if it is absent several times in
    a row.
    """

    def __init__(self, ends: Callable[[], Collection[Address]]) -> None:
        self._ends = ends
        self._seen = set(ends())
        self._absent = 0

    def lost(self) -> Address | None:
        """Return an end that was connected and no longer is; call it a few times a second."""
        ends = set(self._ends())
        self._seen |= ends
        gone = self._seen - ends
        self._absent = self._absent + 1 if gone else 0
        return min(gone) if self._absent >= _LOST_AFTER else None


class HeadlessFrontend:
    """Implements `server.frontend.Frontend`; `front` is the address of the server with the API."""

    keep_alive_s = 0.0
    tracing = None
    adapters = None
    grammars = None
    profiler = None
    endpoints: frozenset[Endpoint] = frozenset()
    capacity = Capacity(max_num_seqs=1, max_queued_tokens=None)
    tools = ToolSupport("none", None, "a headless server has no API")

    def __init__(self, front: str) -> None:
        self._front = front
        self._reading = JobCounts()

    def schemas(self) -> WireSchemas:
        return WireSchemas(requests={}, answers={}, definitions={}, streaming=())

    def take_reading(self) -> JobCounts:
        return self._reading

    async def models(self) -> list[JsonObject]:
        return []

    async def _refuse(self, *_args: Any, **_options: Any) -> NoReturn:
        raise HeadlessError(
            "This server has no API: --headless runs engines for the server whose "
            f"--data-parallel-address is {self._front}. Send requests to that server."
        )

    read = handle = reset_prefix_cache = tokenizer_info = _refuse


class HeadlessEngines:
    """The running engine processes of this host."""

    def __init__(self, manager: CoreEngineProcManager, front: str) -> None:
        self._manager = manager
        self._front = front
        self._watch = FrontWatch(partial(_front_ends, manager, front))
        self.frontend = HeadlessFrontend(front)

    def failure(self) -> str | None:
        """Return why an engine has ended, or that the front end has; None while both run."""
        if (ended := _ended_engine(self._manager)) is not None:
            return ended
        if (end := self._watch.lost()) is not None:
            return f"the front end at {self._front} has closed its connection ({end.ip}:{end.port})"
        return None

    async def shutdown(self, timeout_s: float) -> None:
        """Stop the engines; kill them after `timeout_s` seconds."""
        await in_thread(partial(self._manager.shutdown, timeout=timeout_s))

    def kill(self) -> None:
        for process in self._manager.processes:
            process.kill()


class HeadlessLauncher(Launcher):
    """Builds the engines of this host from vLLM's command line, with no front end."""

    async def launch(self) -> HeadlessEngines:
        """Start the engines and wait until each is ready.

        Raises `LaunchError`, also if no front end answers within the five minutes of vLLM.
        """
        with without_garbage_collection():
            try:
                self._built = in_daemon_thread(self._start)
                manager, front, ranks = await asyncio.wrap_future(self._built)
                await self._until_ready(manager, front, ranks)
                return HeadlessEngines(manager, front)
            except Exception as error:
                # The boundary of start-up: every failure ends the process with a reason.
                logger.debug("Start-up failed", exc_info=True)
                reported = ProgressReader(self._run_dir).poll().failure
                raise launch_error(error, self._model, reported) from error

    def _start(self) -> tuple[CoreEngineProcManager, str, int]:
        _, engine_args, config = self._configure()
        _check(config)
        from vllm.utils.network_utils import get_tcp_uri
        from vllm.v1.engine.utils import CoreEngineProcManager
        from vllm.v1.executor.abstract import Executor

        parallel = config.parallel_config
        front = get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port)
        first, count = parallel.data_parallel_rank, parallel.data_parallel_size_local
        logger.info(
            "headless: starting data-parallel engines %d to %d of %d for the front end at %s",
            first,
            first + count - 1,
            parallel.data_parallel_size,
            front,
        )
        manager = CoreEngineProcManager(
            local_engine_count=count,
            start_index=first,
            local_start_index=0,
            vllm_config=config,
            local_client=False,
            handshake_address=front,
            executor_class=Executor.get_class(config),
            log_stats=not engine_args.disable_log_stats,
        )
        return manager, front, count * parallel.world_size

    async def _until_ready(self, manager: CoreEngineProcManager, front: str, ranks: int) -> None:
        """Wait for the ranks and their connections; raise `LaunchError` if an engine ends."""
        # An engine connects after its ranks are ready.
        while not (
            len(list(self._run_dir.glob("progress-*.jsonl"))) >= ranks
            and ProgressReader(self._run_dir).poll().phase == "ready"
            and _front_ends(manager, front)
        ):
            if (ended := _ended_engine(manager)) is not None:
                reported = ProgressReader(self._run_dir).poll().failure
                raise LaunchError(reported or ended)
            await asyncio.sleep(_POLL_S)


def _front_ends(manager: CoreEngineProcManager, front: str) -> frozenset[Address]:
    """Return the remote ends of the engines' established connections to the front end."""
    ends: set[Address] = set()
    # The connection of the handshake ends when all engines are ready.
    ignored_ports = {urlsplit(front).port}
    for process in manager.processes:
        try:
            # A process that has ended has no connections.
            connections = psutil.Process(process.pid).net_connections("tcp") if process.pid else ()
        except psutil.Error:
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                # Ranks of one host are connected to each other, at these ports.
                ignored_ports.add(connection.laddr.port)
            elif connection.status == psutil.CONN_ESTABLISHED:
                ends.add(Address(*connection.raddr))
    return frozenset(end for end in ends if end.port not in ignored_ports)


def _ended_engine(manager: CoreEngineProcManager) -> str | None:
    """Return the name and exit code of an engine process that has ended, None without one."""
    for name, code in manager.finished_procs().items():
        return f"engine process {name} ended with exit code {code}"
    return None


def _check(config: VllmConfig) -> None:
    """Raise `LaunchError` for flags with which no engine of this host would belong to another."""
    parallel = config.parallel_config
    last = parallel.data_parallel_rank + parallel.data_parallel_size_local
    if parallel.data_parallel_size_local >= parallel.data_parallel_size:
        raise LaunchError(
            f"--headless with --data-parallel-size-local {parallel.data_parallel_size_local} of "
            f"--data-parallel-size {parallel.data_parallel_size}: the server with the API has at "
            "least one engine, so this one has fewer than all",
            exit_code=2,
        )
    if parallel.data_parallel_rank < 1 or last > parallel.data_parallel_size:
        raise LaunchError(
            f"--data-parallel-start-rank {parallel.data_parallel_rank} of a headless server with "
            f"{parallel.data_parallel_size_local} of {parallel.data_parallel_size} engines must be "
            f"1 to {parallel.data_parallel_size - parallel.data_parallel_size_local}; the server "
            "with the API has the engines from 0",
            exit_code=2,
        )
