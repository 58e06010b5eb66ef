"""Starts the engine process from a fork server that has preloaded its modules.

Spawning would import everything after the configuration is known; forking this process would copy
its listening socket, event loop and threads. The engine starts before the tokenizer is loaded, so
that it reads weights meanwhile.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from server.host.tasks import in_daemon_thread
from server.vllm.patches import engine_parts, require, use_coordinator

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine.core_client import EngineCoreClient

StartMethod = Literal["forkserver", "spawn"]

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
    theirs: Any = async_llm
    make_renderer, client_type = theirs.renderer_from_config, theirs.EngineCoreClient
    options = {
        "vllm_config": config,
        "executor_class": theirs.Executor.get_class(config),
        "log_stats": log_stats or bool(theirs.load_stat_logger_plugin_factories()),
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
