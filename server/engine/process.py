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

_SERVER = multiprocessing.forkserver._forkserver  # no public name
HTTP_PROCESS = "HTTP process "
"""Begin of the names of the children that serve HTTP."""
_GRACE_S = 0.7


def start_forkserver() -> None:
    """Start the fork server, which imports in the background; call it before any thread exists."""
    multiprocessing.set_forkserver_preload(["server.engine.preload"])
    multiprocessing.forkserver.ensure_running()


def forkserver_address() -> str | None:
    """Return the address of this process's fork server, None without one."""
    address: str | None = getattr(_SERVER, "_forkserver_address", None)
    return address


def use_forkserver(address: str | None) -> None:
    """Start children from the fork server of another process, which outlives this one.

    Otherwise multiprocessing would start a second one, without the preloaded modules.
    """
    if address is not None:
        _SERVER._forkserver_address = address  # type: ignore[attr-defined]
        _SERVER.ensure_running = lambda: None  # type: ignore[method-assign]


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
    children = multiprocessing.active_children()
    return [child for child in children if not child.name.startswith(HTTP_PROCESS)]


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
