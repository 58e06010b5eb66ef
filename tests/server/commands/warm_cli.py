"""`rbln-serve` in forks of a process that has imported what its commands import.

Most of a command that asks vLLM is imports: a dozen seconds of them, for one of work. Each command
line still has a process of its own, with its own arguments, environment, folder, streams and end.
What modules read while they are imported, such as VLLM_PLUGINS, and what their ends do is the first
process's: a test of those starts a process by itself.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_PRELOADED = (
    *("server.commands.cli", "server.commands.check", "server.engine.config", "server.vllm.flags"),
    *("vllm.config", "vllm.model_executor.models.llama", "vllm.v1.executor.multiproc_executor"),
    *("rbln_backend.worker.worker", "rbln_backend.worker.check.model_inspection"),
)
_MESSAGE_BYTES = 1 << 20


class WarmCli:
    """A context manager; `run` is what `subprocess.run` of `python -m server` gives."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """``environ`` is what modules see when they are imported."""
        self._environ = dict(environ)

    def __enter__(self) -> WarmCli:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=self._environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # It ends when it reads that nobody is there.
        self._socket.close()
        self._process.wait(60)

    def run(
        self, *args: str, environ: Mapping[str, str], address_space: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Wait up to five minutes; ``address_space`` is a limit in bytes."""
        command = {
            "args": args,
            "environ": dict(environ),
            "folder": str(Path.cwd()),
            "address_space": address_space,
        }
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            message = json.dumps(command).encode()
            socket.send_fds(self._socket, [message], [out.fileno(), errors.fileno()])
            self._socket.settimeout(300)
            status = self._socket.recv(_MESSAGE_BYTES)
            assert status, "the process that forks has ended"
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(args, int(status), out.read(), errors.read())


def _serve(connection: socket.socket) -> None:
    """Answer each command with the status of its fork, until the other end is closed."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _command(json.loads(message), *streams)
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(pid, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _command(command: dict[str, Any], out: int, errors: int) -> NoReturn:
    from server.commands.cli import main

    for stream, number in ((out, 1), (errors, 2)):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(command["environ"])
    os.chdir(command["folder"])
    sys.argv = ["rbln-serve", *command["args"]]
    if command["address_space"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (command["address_space"],) * 2)
    try:
        status: Any = main()
    except SystemExit as end:
        status = end.code
    except Exception:  # noqa: BLE001 - it is told as the interpreter would tell it
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter would take seconds to put all modules away.
    os._exit(status)


if __name__ == "__main__":
    for name in _PRELOADED:
        import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
