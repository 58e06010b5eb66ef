"""Starts the engine process from a fork server that has preloaded its modules.

Spawning would import everything after the configuration is known; forking this process would copy
its listening socket, event loop and threads.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import time
from typing import Literal

StartMethod = Literal["forkserver", "spawn"]

_GRACE_S = 0.7


def start_forkserver() -> None:
    """Start the fork server, which imports in the background; call it before any thread exists."""
    multiprocessing.set_forkserver_preload(["server.engine.preload"])
    multiprocessing.forkserver.ensure_running()


def choose_start_method(method: StartMethod) -> None:
    """Make vLLM start its engine process by `method`.

    vLLM 0.30's launcher supports VLLM_WORKER_MULTIPROC_METHOD=forkserver, but its table of
    variables refuses that value. Replacing the table's row affects this process only: engine
    processes that start workers still follow the variable.
    """
    from vllm import envs

    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: method


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
