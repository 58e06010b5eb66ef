"""The template of the models' processes: imports once, then forks a process for each command.

A command is the rest of a command line with its environment. A waiting process between the template
and the command reports the exit status.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from server.host.importing import without_garbage_collection
from server.model_pool.template import MESSAGE_BYTES
from server.settings import adopt_environment

_PR_SET_PDEATHSIG = 1
_IMPORTED = (
    *("server.commands.check", "server.engine.config", "server.vllm.flags"),
    *("server.service", "server.engine.launch", "server.vllm.frontend"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.model_loader"),
    *("vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor"),
    "vllm.v1.executor.multiproc_executor",
)
"""Modules of the two processes of a model: the one that answers, and its engine."""


def serve_forks(connection: socket.socket) -> None:
    """Import, then fork a process for each command until the front process ends."""
    from rbln_backend.host.process_life import outlive_readers

    _end_with_parent(signal.SIGKILL)
    # Ctrl-C reaches every process of the foreground group; the front process ends the others.
    os.setpgid(0, 0)
    outlive_readers()
    _import()
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        if not message:
            _end_children(children)
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run_and_report(json.loads(message), descriptors)
        children.add(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        _reap(children)


def _import() -> None:
    import setproctitle

    from rbln_backend import api
    from server.vllm.importing import import_serving, import_vllm

    # It finds the place of the title by the environment, which commands replace.
    setproctitle.getproctitle()
    setproctitle.setproctitle("rbln-serve: template of the models' processes")
    with without_garbage_collection():
        import_vllm()
        for name in _IMPORTED:
            importlib.import_module(name)
        import_serving()
        if api.is_active():
            api.load_worker()


def _run_and_report(command: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Run the command in a child and send its process id, then its exit status; never returns."""
    statuses = socket.socket(fileno=descriptors[0])
    # A killed template closes no pipe of this process.
    _end_with_parent(signal.SIGTERM)
    pid = os.fork()
    if pid == 0:
        statuses.close()
        _end_with_parent(signal.SIGTERM)
        _run(command, descriptors[1] if len(descriptors) > 1 else None)
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    # Ends when the command ends; a signal to the waiting process ends the command.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    with suppress(OSError):
        statuses.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        statuses.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(command: dict[str, Any], output: int | None) -> None:
    """Run the command in this process and end it."""
    from multiprocessing.util import _exit_function  # type: ignore[attr-defined]

    import setproctitle

    from server.commands.cli import main

    os.setpgid(0, 0)
    if output is not None:
        os.dup2(output, 1)
        os.close(output)
    adopt_environment(command["environ"])
    sys.argv = ["rbln-serve", *command["args"]]
    setproctitle.setproctitle(" ".join(sys.argv))
    _fork_fork_servers()
    status = 1
    try:
        status = _status(main(command["args"]))
    except SystemExit as end:
        status = _status(end.code)
    except BaseException:  # noqa: BLE001 - shown as the interpreter shows it
        traceback.print_exc()
    finally:
        # What the interpreter does at its end, without freeing all modules.
        _exit_function()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status(code: object) -> int:
    """Return the exit status that the interpreter makes of a SystemExit's code."""
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _fork_fork_servers() -> None:
    """Make `multiprocessing` fork its fork server from this process instead of executing Python.

    The modules that the fork server preloads are imported already.
    """
    from multiprocessing import forkserver, util

    execute = util.spawnv_passfds

    def start(path: bytes, args: Sequence[Any], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in args[-1]:
            return int(execute(path, args, descriptors))
        pid = os.fork()
        if pid == 0:
            _close_all_but({0, 1, 2, *descriptors})
            status = 1
            try:
                places, names = _arguments(args[-1])
                forkserver.main(*places, **names)
                status = 0
            finally:
                os._exit(status)
        return pid

    util.spawnv_passfds = start  # type: ignore[assignment]


def _arguments(line: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the call that ends a line of Python, all of them literals."""
    last = ast.parse(line).body[-1]
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    names: dict[str, Any] = {}
    for keyword in last.value.keywords:
        value = ast.literal_eval(keyword.value)
        names |= value if keyword.arg is None else {keyword.arg: value}
    return [ast.literal_eval(place) for place in last.value.args], names


def _close_all_but(kept: set[int]) -> None:
    # The folder's own descriptor is among them, so they are listed first.
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with suppress(OSError):
                os.close(int(path.name))


def _end_with_parent(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _reap(children: set[int]) -> None:
    """Remove waiting processes that have ended."""
    while children and (pid := os.waitpid(-1, os.WNOHANG)[0]):
        children.discard(pid)


def _end_children(children: set[int]) -> None:
    """End the commands that the front process has left, and wait for them."""
    _reap(children)
    for pid in children:
        os.kill(pid, signal.SIGTERM)
    while children:
        children.discard(os.waitpid(-1, 0)[0])
