"""Running the HTTP service, for `serve` and `batch`."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands.flags import PROG, flag_of, vllm_flags
from server.settings import ServerSettings, SettingsError, export_log_level, export_service_name

if TYPE_CHECKING:
    from server.engine.launch import VllmLauncher
    from server.headless import HeadlessLauncher

_BACKLOG = 2048
_SWITCH_S = 0.001
_VLLM_SECRET = "--hf-token"
"""The flag of vLLM that is a secret and no setting of this server."""


def check_secrets(parser: argparse.ArgumentParser, settings: ServerSettings) -> None:
    """Exit with 2 for invalid keys or certificates, before the server listens."""
    from server.http.auth import Access
    from server.http.listener import Tls

    try:
        Access(settings)
        if settings.ssl_certfile is not None:
            Tls(settings)
    except SettingsError as error:
        parser.error(str(error))


def hide_secrets(argv: Sequence[str]) -> None:
    """Remove secrets from the process title, which every user of the host can read."""
    words = hidden_secrets(argv)
    if words != list(argv):
        import setproctitle

        setproctitle.setproctitle(" ".join((PROG, "serve", *words)))


def hidden_secrets(argv: Sequence[str]) -> list[str]:
    """Return the command line with asterisks in place of secrets."""
    words = list(argv)
    ours = {flag_of(name): field.annotation for name, field in ServerSettings.model_fields.items()}
    secret = {_VLLM_SECRET} | {flag for flag, kind in ours.items() if "Secret" in str(kind)}
    known = vllm_flags() | ours.keys()
    for index, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        name = flag.replace("_", "-")
        # Parsers accept the beginning of a flag's name as well.
        if name not in secret and (
            name in known
            or not (len(name) > len("--") and any(flag.startswith(name) for flag in secret))
        ):
            continue
        if equals:
            words[index] = f"{flag}=***"
        elif index + 1 < len(words) and not words[index + 1].startswith("--"):
            words[index + 1] = "***"
    return words


def run_server(
    settings: ServerSettings,
    engine_argv: list[str],
    joined: Callable[[Coroutine[Any, Any, int], str], Coroutine[Any, Any, int]] | None = None,
) -> int:
    """Serve until the end; `joined` combines the service with work that uses its URL."""
    from rbln_backend.host.processes import outlive_readers
    from server.host.files import run_folder
    from server.host.tasks import without_garbage_collection

    outlive_readers()
    export_log_level(settings)
    export_service_name()
    listener = _listen_or_exit(settings)
    if settings.engine_start == "forkserver":
        from server.engine.process import start_forkserver

        start_forkserver()
    with run_folder(settings.run_root) as run_dir:
        with without_garbage_collection():
            from asyncio import Runner

            import uvloop

            from server.service import serve

        launcher = _launcher(settings, engine_argv, run_dir)
        # Conversations are rendered in threads, which yield to the event loop after 1 ms.
        sys.setswitchinterval(_SWITCH_S)
        with Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                service: Coroutine[Any, Any, int]
                service = serve(settings, launcher, listener, run_dir, _process_start())
                if joined is not None:
                    service = joined(service, f"http://127.0.0.1:{listener.getsockname()[1]}")
                code = runner.run(service)
            except SettingsError as error:
                # Errors that only appear when files or folders are opened.
                raise SystemExit(f"{PROG}: {error}") from None
    if launcher.building:
        # A thread still imports modules or waits for an engine; the interpreter's shutdown would
        # interfere with it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _launcher(
    settings: ServerSettings, engine_argv: list[str], run_dir: Path
) -> VllmLauncher | HeadlessLauncher:
    if settings.headless:
        from server.headless import HeadlessLauncher

        return HeadlessLauncher(engine_argv, settings, run_dir)
    from server.engine.launch import VllmLauncher

    return VllmLauncher(engine_argv, settings, run_dir)


def _listen_or_exit(settings: ServerSettings) -> socket.socket:
    """Return a listening socket, in whose backlog clients wait; raises `SystemExit` without one."""
    try:
        if settings.uds is not None:
            return _listen_at_path(settings.uds)
        host, port = settings.host, settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        raise SystemExit(f"{PROG}: cannot listen on {where}: {error}") from None


def _listen_at_path(path: Path) -> socket.socket:
    """Return a listening Unix socket of this user alone; a socket without a server is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise FileExistsError(errno.EADDRINUSE, "another server listens there")
            path.unlink()
        # The mode of the file is set before it accepts connections.
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _process_start() -> float:
    """Return the start time of this process on the clock of `time.monotonic`."""
    stat = Path("/proc/self/stat").read_text(encoding="ascii")
    ticks = int(stat.rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age
