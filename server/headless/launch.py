"""Launches data-parallel engines that the front end of another server uses."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rbln_backend.api.reports import ProgressReader
from server.engine.launch import Launcher
from server.engine.launch_errors import launch_error
from server.frontend import LaunchError
from server.headless.connections import Address, FrontWatch, remote_ends
from server.headless.frontend import HeadlessFrontend
from server.host.tasks import in_daemon_thread, in_thread, without_garbage_collection

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.utils import CoreEngineProcManager

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class HeadlessEngines:
    """The running engine processes of this host."""

    def __init__(self, manager: CoreEngineProcManager, front: str) -> None:
        self._manager = manager
        self._front = front
        self._watch = FrontWatch(partial(front_ends, manager, front))
        self.frontend = HeadlessFrontend(front)

    def failure(self) -> str | None:
        """Return why an engine has ended, or that the front end has; None while both run."""
        if (ended := ended_engine(self._manager)) is not None:
            return ended
        if (end := self._watch.lost()) is not None:
            return f"the front end at {self._front} has closed its connection ({end.ip}:{end.port})"
        return None

    async def shutdown(self, timeout_s: float) -> None:
        """Stop the engines; kill them after `timeout_s` seconds."""
        await in_thread(partial(self._manager.shutdown, timeout=timeout_s))

    def kill(self) -> None:
        """Kill the engines."""
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
            *(first, first + count - 1, parallel.data_parallel_size, front),
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
        while not (self._are_ready(ranks) and front_ends(manager, front)):
            if (ended := ended_engine(manager)) is not None:
                reported = ProgressReader(self._run_dir).poll().failure
                raise LaunchError(reported or ended)
            await asyncio.sleep(_POLL_S)

    def _are_ready(self, ranks: int) -> bool:
        files = list(self._run_dir.glob("progress-*.jsonl"))
        return len(files) >= ranks and ProgressReader(self._run_dir).poll().phase == "ready"


def front_ends(manager: CoreEngineProcManager, front: str) -> frozenset[Address]:
    """Return the ends of the engines' connections to the front end."""
    pids = [process.pid for process in manager.processes if process.pid is not None]
    # The connection of the handshake ends when all engines are ready.
    return remote_ends(pids, without=urlsplit(front).port)


def ended_engine(manager: CoreEngineProcManager) -> str | None:
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
