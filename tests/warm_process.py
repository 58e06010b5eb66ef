"""`rbln-serve`, scripts and pytest's workers as forks of a process that has imported vLLM.

Imports are 20 of the 21 CPU seconds that a server with a tiny model takes to start, half of them
in the HTTP process and half in its fork server, and most of a worker's before its first test. Here
one process imports for all of a test run. Each command line still is a process of its own, with its
own arguments, environment, folder, streams, exit status and fork server.

What modules read while they are imported, such as VLLM_PLUGINS, is the first process's: a test of
that starts its own process instead.
"""

import atexit
import gc
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from select import select
from types import ModuleType
from typing import IO, Any

_PRELOADED = (
    *"server.commands.cli server.commands.check server.engine.config server.vllm.flags".split(),
    *"server.service server.engine.launch server.vllm.frontend".split(),
    *"vllm.config vllm.model_executor.models.llama vllm.model_executor.model_loader".split(),
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "rbln_backend.worker.worker",
    *"rbln_backend.worker.check rbln_backend.scheduler.scheduler numpy.random".split(),
    # What a start imports when it comes to it.
    *"vllm.model_executor.layers.quantization.online.base jsonschema pydantic.v1".split(),
    "rbln_backend.grammar.reasoning",
    # Of workers.
    *"hypothesis schemathesis openai anthropic selenium.webdriver.chrome.webdriver".split(),
)
_SET_BEFORE_IMPORTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # As `rbln-serve` sets it without --log-level.
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_MESSAGE_BYTES = 1 << 20
_READY = b"ready"


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use, for a process that is not a child."""

    def __init__(self, statuses: socket.socket) -> None:
        """`statuses` sends the process id, and the exit status once there is one."""
        self._statuses = statuses
        statuses.settimeout(60)
        self.pid = int(statuses.recv(_MESSAGE_BYTES))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None) -> int:
        """Return the exit status.

        Raises `subprocess.TimeoutExpired` after `timeout` seconds, with None never.
        """
        status = self._read(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._statuses.settimeout(timeout)
            try:
                message = self._statuses.recv(_MESSAGE_BYTES)
            except (BlockingIOError, TimeoutError):
                return None
            assert message, "the process that waits for the command has ended"
            self.returncode = int(message)
            self._statuses.close()
        return self.returncode


class WarmProcess:
    """The process that has imported; it ends when its last user ends or calls `close`."""

    def __init__(self, environ: Mapping[str, str], address: str) -> None:
        """`environ` is what modules see when they are imported; it listens at `address`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while True:
            # Unless another worker has started it.
            with suppress(OSError):
                _start_listening(environ, address)
            if self._socket.connect_ex(address) == 0:
                break
            time.sleep(0.01)
        # A busy machine takes a minute.
        self._socket.settimeout(300)
        assert self._socket.recv(_MESSAGE_BYTES) == _READY, "the imports have failed"

    def close(self) -> None:
        self._socket.close()

    def start(
        self,
        *args: str,
        environ: Mapping[str, str],
        output: IO[Any],
        errors: IO[Any],
        commands: IO[Any] | None = None,
        address_space: int | None = None,
        script: Path | None = None,
    ) -> ForkedProcess:
        """Start `rbln-serve args`, or `script args`; `address_space` is a limit in bytes.

        Of `environ`, the folders in PYTHONPATH come first on the import path, as in a new process.
        With `commands`, its standard input, it is a Python that runs the last of `args`.
        """
        command = {
            "script": None if script is None else str(script),
            "args": args,
            "environ": dict(environ),
            "folder": str(Path.cwd()),
            "address_space": address_space,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [output.fileno(), errors.fileno(), theirs.fileno()]
            if commands is not None:
                descriptors.insert(0, commands.fileno())
            socket.send_fds(self._socket, [json.dumps(command).encode()], descriptors)
        return ForkedProcess(ours)

    def run(
        self, *args: str, environ: Mapping[str, str], timeout: float = 300, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, which may take `timeout` seconds, as `subprocess.run` does.

        `options` are those of `start`.
        """
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            streams: dict[str, Any] = {"output": output, "errors": errors}
            status = self.start(*args, environ=environ, **streams, **options).wait(timeout)
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(args, status, output.read(), errors.read())


def run_address() -> str:
    """Return the address of the test run's process; what is started from now on knows it, too."""
    return os.environ.setdefault("WARM_PROCESS", f"rbln-serve-tests-{os.getpid()}")


@cache
def warm_process() -> WarmProcess:
    """Return the one of this test run."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_"))}
    warm = WarmProcess({**ours, **_SET_BEFORE_IMPORTS}, "\0" + run_address())
    atexit.register(warm.close)
    return warm


def _start_listening(environ: Mapping[str, str], address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_process", str(listener.fileno())],
            env=dict(environ),
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            # A worker's is its connection.
            stdout=subprocess.DEVNULL,
        )
    # It may outlive this worker, of which `Popen` would warn.
    process.returncode = 0


def _next_command(listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a command in the process that is to run it; None in the first one, at the end."""
    users: list[socket.socket] = []
    while True:
        connection, *_ = select([listener, *users], [], [])[0]
        if connection is listener:
            users.append(listener.accept()[0])
            users[-1].send(_READY)
            continue
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 4)
        if not message:
            connection.close()
            users.remove(connection)
            if not users:
                return None
            continue
        if os.fork() == 0:
            for one in (listener, *users):
                one.close()
            statuses = socket.socket(fileno=descriptors.pop())
            pid = os.fork()
            if pid == 0:
                statuses.close()
                return json.loads(message), descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            statuses.send(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            with suppress(BrokenPipeError):
                statuses.send(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(command: dict[str, Any], streams: list[int]) -> int:
    """Run a command with the last of the three standard streams; with all of them, as Python."""
    from server.commands.cli import main

    for number, descriptor in enumerate(streams, 3 - len(streams)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(command["environ"])
    time.tzset()
    os.chdir(command["folder"])
    script = command["script"]
    sys.argv = [script or "rbln-serve", *command["args"]]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if command["address_space"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (command["address_space"],) * 2)
    if len(streams) == 3:
        sys.stdin = os.fdopen(0)
        sys.modules["__main__"] = new = ModuleType("__main__")
        exec(sys.argv[-1], vars(new))  # noqa: S102 - as Python's option -c
        return 0
    # A traced graph is a hundred thousand objects: the default collects every 700.
    gc.set_threshold(50_000, 20, 20)
    # vLLM thaws all objects when an engine ends: each collection would look at a million, 1 s.
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, lambda: None)
    _fork_fork_servers()
    try:
        if script is not None:
            runpy.run_path(script, run_name="__main__")
            return 0
        return _status(main())
    except SystemExit as end:
        return _status(end.code)
    except Exception:  # noqa: BLE001 - shown as the interpreter shows it
        traceback.print_exc()
        return 1


def _status(code: Any) -> int:
    """Return the exit status that the interpreter makes of a SystemExit's code."""
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _fork_fork_servers() -> None:
    """Let `multiprocessing` fork its fork server from this process instead of executing Python.

    The modules that it preloads are then imported already; what they do when they are executed,
    as `server.engine.preload` does, still happens in the fork server.
    """
    from multiprocessing import util

    execute = util.spawnv_passfds  # type: ignore[attr-defined]

    def start(path: bytes, args: Sequence[Any], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in args[-1]:
            return int(execute(path, args, descriptors))
        pid = os.fork()
        if pid == 0:
            _close_all_but({0, 1, 2, *descriptors})
            status = 1
            try:
                exec(args[-1], {})  # noqa: S102 - the line that Python would execute
                status = 0
            finally:
                os._exit(status)
        return pid

    util.spawnv_passfds = start  # type: ignore[attr-defined]


def _close_all_but(kept: set[int]) -> None:
    # The folder's own descriptor is among them, so they are listed first.
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with suppress(OSError):
                os.close(int(path.name))


def _import_what_serves() -> None:
    from server.engine.launch import import_serving
    from server.vllm.flags import serve_parser

    import_serving()
    # vLLM keeps what it reads out of its sources for the help of its flags.
    serve_parser()


def _serve() -> None:
    from multiprocessing.util import _exit_function  # type: ignore[attr-defined]

    import setproctitle

    from rbln_backend.vllm_patches import inspect_models_here
    from server.host.tasks import without_garbage_collection
    from tests.graph_cache import trace_once

    # It finds the place of the title by the environment, which commands replace.
    setproctitle.getproctitle()
    with without_garbage_collection():
        for name in _PRELOADED:
            import_module(name)
        _import_what_serves()
    inspect_models_here()
    trace_once()
    gc.collect()
    gc.freeze()
    found = _next_command(socket.socket(fileno=int(sys.argv[1])))
    if found is None:
        return
    status = _run(*found)
    if len(found[1]) == 3:
        # A worker has processes of references, which end with the interpreter.
        sys.exit(status)
    # What the interpreter does at its end, without the seconds it takes to free all modules.
    _exit_function()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _hand_over() -> int:
    """Let a fork run the code of Python's option -c with the streams of this process."""
    streams = {"commands": sys.stdin, "output": sys.stdout, "errors": sys.stderr}
    return warm_process().start(sys.argv[-1], environ=os.environ, **streams).wait(None)


if __name__ == "__main__":
    if "-c" in sys.argv:
        sys.exit(_hand_over())
    _serve()
