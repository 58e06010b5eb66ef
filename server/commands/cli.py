"""The command line `rbln-serve COMMAND ...`, and the HTTP service of `serve` and `batch`.

`serve`, `check`, `compile` and `batch` take MODEL, our flags and vLLM's flags. Only our
own flags are parsed here, in milliseconds; vLLM's parser gets the rest once vLLM is imported, while
the server already listens. Exit codes: 0 success (serve: stopped by a signal), 1 failure or a model
that cannot run, 2 invalid command line.
"""

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

from server import __version__
from server.commands.flags import (
    PROG,
    get_flag,
    get_settings,
    model_flags,
    nearest,
    server_parser,
    split,
    vllm_flags,
)
from server.observability.logging import configure
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
    kind_by_flag = {
        get_flag(name): field.annotation for name, field in ServerSettings.model_fields.items()
    }
    secret = {_VLLM_SECRET} | {flag for flag, kind in kind_by_flag.items() if "Secret" in str(kind)}
    known = vllm_flags() | kind_by_flag.keys()
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


Command = Callable[[Sequence[str]], int]


def _serve(argv: Sequence[str]) -> int:
    parser = server_parser("serve")
    flags, rest = split(parser, argv)
    settings = get_settings(parser, flags, rest)
    check_secrets(parser, settings)
    hide_secrets(argv)
    return run_server(settings, rest)


def _check(argv: Sequence[str]) -> int:
    parser = server_parser("check")
    _add_json(parser)
    flags, rest = split(parser, argv)
    as_json = bool(flags.pop("json", False))
    settings = get_settings(parser, flags, rest)
    from server.commands.check import check

    return check(rest, settings, as_json=as_json)


def _compile(argv: Sequence[str]) -> int:
    parser = server_parser("compile")
    about = (
        "also build kernels for these CPUs: native, portable, avx2, avx512, avx512_bf16, "
        "or all; unset: for this host"
    )
    parser.add_argument("--isa", action="append", metavar="LEVEL", help=about)
    _add_json(parser)
    flags, rest = split(parser, argv)
    as_json, levels = bool(flags.pop("json", False)), flags.pop("isa", [])
    settings = get_settings(parser, flags, rest)
    from server.commands.check import compile_ahead

    assert isinstance(levels, list)
    targets = [name for names in levels for name in names.split(",")]
    return compile_ahead(rest, settings, targets, as_json=as_json)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _batch(argv: Sequence[str]) -> int:
    parser = server_parser("batch")
    parser.usage = f"{PROG} batch FILE -o OUT --model MODEL [options] [vLLM options]"
    parser.add_argument("--model", metavar="MODEL", help="the model, as for serve")
    parser.add_argument("-i", "--input-file", metavar="FILE", help="FILE, instead of the argument")
    parser.add_argument("-o", "--output-file", metavar="OUT", help="file for the answers")
    flags, rest = split(parser, argv)
    named = [flags.pop(name, None) for name in ("input_file", "output_file", "model")]
    if named[0] is None and rest and not rest[0].startswith("-"):
        named[0] = rest.pop(0)
    if None in named:
        parser.error("FILE, -o OUT and --model MODEL are needed")
    source, target, model = map(str, named)
    from server.commands.batch import Work, answer_file, beside, get_job_paths

    settings = get_settings(parser, flags, [model, *rest])
    try:
        paths = get_job_paths((source, target))
    except ValueError as error:
        parser.error(str(error))

    def serve(private: ServerSettings, work: Work) -> int:
        return run_server(private, [model, *rest], lambda run, url: beside(run, work(url)))

    return answer_file(*paths, settings, serve)


def _cache(argv: Sequence[str]) -> int:
    from server.commands.cache import cache

    return cache(argv, model_flags)


def _fetch(argv: Sequence[str]) -> int:
    from server.commands.fetch import fetch

    configure("info", "text")
    return fetch(argv)


def _tune(argv: Sequence[str]) -> int:
    from server.commands.tune import tune

    return tune(argv)


def _parity(argv: Sequence[str]) -> int:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rbln_backend.parity.command", *argv])


def _collect_env(argv: Sequence[str]) -> int:
    from server.commands.collect_env import collect_env

    return collect_env(argv)


COMMANDS: dict[str, tuple[Command, str]] = {
    "serve": (_serve, "serve a model over HTTP"),
    "check": (_check, "report whether a model can be served"),
    "compile": (_compile, "fill the compile cache ahead of time"),
    "batch": (_batch, "answer a file of requests"),
    "fetch": (_fetch, "download a model"),
    "cache": (_cache, "list, check and move the compile cache"),
    "tune": (_tune, "suggest bucket sizes for recorded traffic"),
    "parity": (_parity, "compare the engine with vLLM's CPU backend and transformers"),
    "collect-env": (_collect_env, "print versions, hardware and settings for a bug report"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in COMMANDS:
        run, _ = COMMANDS[args[0]]
        return run(args[1:])
    parser = argparse.ArgumentParser(
        prog=PROG, description="Serve a model over the OpenAI API on RBLN devices."
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (_, about) in COMMANDS.items():
        commands.add_parser(name, help=about, add_help=False)
    if args and not args[0].startswith("-"):
        hint = nearest(args[0], COMMANDS) or f"; commands: {', '.join(COMMANDS)}"
        parser.error(f"unknown command {args[0]!r}{hint}")
    parser.parse_args(args)
    parser.print_help()
    return 2
