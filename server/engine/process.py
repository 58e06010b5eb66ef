"""Starts the engine process from a fork server with its modules, and detects one that hangs.

Spawning would import everything after the configuration is known; forking this process would copy
its listening socket, event loop and threads. The engine starts before the tokenizer is loaded, so
that it reads weights meanwhile.

The engine sends a message after every step and answers queries between two steps. An engine
without any message for `--step-timeout-s`, despite a query after half that time, hangs in a kernel
or a driver, or was stopped. An engine that answers but runs no step for that long although it has
requests has lost them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.forkserver
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from server.host.tasks import in_daemon_thread
from server.vllm.patches import engine_parts, require, use_coordinator

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.core_client import EngineCoreClient

_GRACE_S = 0.7


def start_forkserver() -> None:
    """Start the fork server, which imports in the background; call it before any thread exists."""
    multiprocessing.set_forkserver_preload(["server.engine.preload"])
    multiprocessing.forkserver.ensure_running()


class _StartedEngine:
    """Replaces the renderer in vLLM's client, which calls it once the engine was started."""

    def __init__(self) -> None:
        self.is_started = threading.Event()

    def start_mm_warmup_in_background(self) -> None:
        """Note that the engine process was started."""
        self.is_started.set()


@contextmanager
def engine_first(config: VllmConfig, *, log_stats: bool) -> Iterator[None]:
    """Let an AsyncLLM of `config`, made in the block, start its engine before its renderer.

    AsyncLLM loads the tokenizer first: 1.9 s of processor time for 128,256 tokens. A thread beside
    it would not help, because reading tokenizer.json holds the interpreter's lock. `log_stats`:
    vLLM's option, true as well with plug-ins that log statistics.
    """
    from vllm.v1.engine import async_llm

    # What the module has imported, to type checkers not its own.
    module: Any = async_llm
    make_renderer, client_type = module.renderer_from_config, module.EngineCoreClient
    options = {
        "vllm_config": config,
        "executor_class": module.Executor.get_class(config),
        "log_stats": log_stats or bool(module.load_stat_logger_plugin_factories()),
        "client_addresses": None,
        "client_count": 1,
        "client_index": 0,
    }
    engine = _StartedEngine()
    clients: list[Future[EngineCoreClient]] = []

    def start_engine() -> EngineCoreClient:
        from server.engine.coordinator import Coordinator

        use_coordinator(Coordinator)
        try:
            client: EngineCoreClient = client_type.make_async_mp_client(**options, renderer=engine)
            return client
        finally:
            # Also after a failure, which the future reports.
            engine.is_started.set()

    def render_later(config: VllmConfig) -> BaseRenderer:
        clients.append(in_daemon_thread(start_engine))
        engine.is_started.wait()
        renderer: BaseRenderer = make_renderer(config)
        renderer.start_mm_warmup_in_background()
        return renderer

    class StartedClient:
        """The client whose engine was started by `render_later`."""

        @staticmethod
        def make_async_mp_client(**given: Any) -> EngineCoreClient:
            del given["renderer"]
            require(given == options, "AsyncLLM")
            return clients[0].result()

    try:
        with engine_parts(render_later, StartedClient):
            yield
    except Exception:
        if clients:
            # A tokenizer that cannot be read must not leave an engine, or a thread that waits.
            end_engine_processes()
            wait(clients, timeout=_GRACE_S)
        raise


def engine_processes() -> list[multiprocessing.process.BaseProcess]:
    """Return this process's children that were started as engine processes."""
    return list(multiprocessing.active_children())


def end_engine_processes() -> None:
    """Terminate the engine processes, and kill those that take longer than 0.7 seconds."""
    processes = engine_processes()
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()


_MAX_PERIOD_S = 1.0
_READS = 8


class HangWatch:
    """Counts the seconds without a message; used from the event loop only."""

    def __init__(
        self,
        timeout_s: float,
        messages: Callable[[], int],
        query: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`messages` returns the number received; `query` waits for an answer of the engine.

        `timeout_s` 0: never.
        """
        self._timeout_s = timeout_s
        self._messages = messages
        self._send_query = query
        self._clock = clock
        self._seen = -1
        self._checked_at = 0.0
        self._silent_s = 0.0
        self._query: asyncio.Task[None] | None = None

    def hung_for_s(self) -> float | None:
        """Return the silent seconds of a hung engine, None while it is not hung.

        Call it several times a second. At most one second counts between two calls, because this
        process may have been stopped itself.
        """
        if not self._timeout_s:
            return None
        now = self._clock()
        since, self._checked_at = now - self._checked_at, now
        if self._seen != (messages := self._messages()):
            self._seen, self._silent_s = messages, 0.0
            if self._query is not None:
                self._query.cancel()
                self._query = None
            return None
        self._silent_s += min(since, _MAX_PERIOD_S)
        if self._silent_s >= self._timeout_s:
            return self._silent_s
        if self._silent_s >= self._timeout_s / 2 and self._query is None:
            self._query = asyncio.ensure_future(self._run_query())
        return None

    async def _run_query(self) -> None:
        # The failure of a dead engine is reported by `VllmEngine.failure`.
        with contextlib.suppress(Exception):
            await self._send_query()


class IdleWatch:
    """Counts the seconds in which the engine has requests but runs no step."""

    def __init__(
        self,
        timeout_s: float,
        unfinished: Callable[[], int],
        computed: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unfinished` returns the number of requests; `timeout_s` 0: never.

        `computed` returns a number that grows with every step, None if unknown. It reads files, so
        it is called at most `_READS` times within `timeout_s`.
        """
        self._timeout_s = timeout_s
        self._unfinished, self._computed = unfinished, computed
        self._clock = clock
        self._seen: float | None = None
        self._checked_at = self._idle_s = self._since_read_s = 0.0

    def idle_for_s(self) -> float | None:
        """Return the idle seconds of a stalled engine, None while it is not stalled.

        Call it several times a second, as `HangWatch.hung_for_s`.
        """
        if not self._timeout_s:
            return None
        now = self._clock()
        since, self._checked_at = min(now - self._checked_at, _MAX_PERIOD_S), now
        if not self._unfinished():
            self._idle_s = self._since_read_s = 0.0
            return None
        self._idle_s += since
        self._since_read_s += since
        if self._since_read_s < self._timeout_s / _READS:
            return None
        self._since_read_s = 0.0
        computed = self._computed()
        if computed is None or computed != self._seen:
            self._seen, self._idle_s = computed, 0.0
        return self._idle_s if self._idle_s >= self._timeout_s else None
