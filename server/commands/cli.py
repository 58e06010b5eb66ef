"""The command line: `rbln-serve serve|check|compile MODEL [our flags] [vLLM's flags, verbatim]`.

`batch` answers a file with MODEL as `--model`; `fetch`, `tune` and `cache`
(`server.commands.cache_cli`) need no model.

Only our own flags are parsed here, in milliseconds; vLLM's parser gets the rest once vLLM is
imported, while the server already listens. Exit codes: 0 success (serve: stopped by a signal), 1
failure or a model that cannot run, 2 invalid command line.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from server import __version__
from server.observability.logging import configure
from server.settings import (
    ENV_PREFIX,
    ServerSettings,
    SettingsError,
    export_log_level,
    export_service_name,
    load_settings,
)

_PROG = "rbln-serve"
_ABOUT = {
    "serve": "Serve MODEL over HTTP: a directory, a .gguf file, a model downloaded by `fetch`, or "
    "one on the Hugging Face hub.",
    "check": "Report whether and how MODEL can be served, without reading its weights.",
    "batch": "Write the answers to the requests in FILE to OUT, without a service.",
    "compile": "Fill the compile cache for MODEL ahead of time; only an NPU needs its weights.",
}
_EPILOG = """\
Every flag of `vllm serve` for the engine, chat templates, tools and LoRA is accepted as well, with
the same meaning; --help=all lists them, --help=max-num-seqs explains one.
"""
# Settings that vLLM has under the same name, which its --config file may contain.
_SHARED_WITH_VLLM = (
    *("host", "port", "root_path", "api_key"),
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    "enable_ssl_refresh",
    *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
)
_SECRET_FLAGS = ("--api-key", "--admin-key", "--ssl-keyfile-password")
_BACKLOG = 2048
_SWITCH_S = 0.001


def _command_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{_PROG} {command}",
        usage=f"{_PROG} {command} MODEL [options] [vLLM options]",
        description=_ABOUT[command],
        epilog=_EPILOG,
        # A prefix of one of our flags may be a flag of vLLM.
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="FLAG", help="show help")
    for name, field in ServerSettings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        about = f"{field.description} [{ENV_PREFIX}{name.upper()}, {field.default!r}]"
        form = _form(field.default)
        parser.add_argument(flag, **form, help=about.replace("%", "%%"))
    return parser


def _form(default: object) -> dict[str, Any]:
    """Return argparse's options of a setting: a switch, a repeatable flag, or a value."""
    if isinstance(default, bool):
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(default, tuple):
        return {"action": "append", "metavar": "X"}
    return {"metavar": "X"}


def _serve(argv: Sequence[str]) -> int:
    parser = _command_parser("serve")
    flags, rest = _split(parser, argv)
    settings = _settings(parser, flags, rest)
    _check_secrets(parser, settings)
    _hide_secrets(argv)
    return _run(settings, rest)


def _check_secrets(parser: argparse.ArgumentParser, settings: ServerSettings) -> None:
    """Exit with 2 for invalid keys or certificates, before the server listens."""
    from server.http.auth import Access
    from server.http.tls import Tls

    try:
        Access(settings)
        if settings.ssl_certfile is not None:
            Tls(settings)
    except SettingsError as error:
        parser.error(str(error))


def _hide_secrets(argv: Sequence[str]) -> None:
    """Remove secrets from the process title, which every user of the host can read."""
    words = list(argv)
    for index, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in _SECRET_FLAGS:
            continue
        if equals:
            words[index] = f"{flag}=***"
        elif index + 1 < len(words):
            words[index + 1] = "***"
    if words != list(argv):
        import setproctitle

        setproctitle.setproctitle(" ".join((_PROG, "serve", *words)))


def _check(argv: Sequence[str]) -> int:
    parser = _command_parser("check")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags, rest = _split(parser, argv)
    as_json = bool(flags.pop("json", False))
    settings = _settings(parser, flags, rest)
    from server.commands.check import check

    return check(rest, settings, as_json=as_json)


def _compile(argv: Sequence[str]) -> int:
    parser = _command_parser("compile")
    about = (
        "also build kernels for these CPUs: native, portable, avx2, avx512, avx512_bf16, "
        "amx_bf16 or all; unset: for this host"
    )
    parser.add_argument("--isa", action="append", metavar="X", help=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags, rest = _split(parser, argv)
    as_json, given = bool(flags.pop("json", False)), flags.pop("isa", [])
    settings = _settings(parser, flags, rest)
    from server.commands.compile import compile_ahead

    assert isinstance(given, list)
    targets = [name for names in given for name in names.split(",")]
    return compile_ahead(rest, settings, targets, as_json=as_json)


def _batch(argv: Sequence[str]) -> int:
    parser = _command_parser("batch")
    parser.usage = f"{_PROG} batch FILE -o OUT --model MODEL [options] [vLLM options]"
    parser.add_argument("--model", metavar="MODEL", help="the model, as for serve")
    parser.add_argument("-i", "--input-file", metavar="FILE", help="FILE, instead of the argument")
    parser.add_argument("-o", "--output-file", metavar="OUT", help="file for the answers")
    flags, rest = _split(parser, argv)
    named = [flags.pop(name, None) for name in ("input_file", "output_file", "model")]
    if named[0] is None and rest and not rest[0].startswith("-"):
        named[0] = rest.pop(0)
    if None in named:
        parser.error("FILE, -o OUT and --model MODEL are needed")
    source, target, model = map(str, named)
    from server.commands.batch import Work, answer_file, beside, paths_of

    settings = _settings(parser, flags, [model, *rest])
    try:
        paths = paths_of((source, target))
    except ValueError as error:
        parser.error(str(error))

    def serve(private: ServerSettings, work: Work) -> int:
        return _run(private, [model, *rest], lambda run, url: beside(run, work(url)))

    return answer_file(*paths, settings, serve)


def _cache(argv: Sequence[str]) -> int:
    from server.commands.cache_cli import cache

    return cache(argv, _model_flags)


def _model_flags(argv: Sequence[str]) -> tuple[list[str], ServerSettings]:
    """Return vLLM's arguments and our settings for MODEL and flags of `serve`."""
    parser = _command_parser("check")
    flags, rest = _split(parser, argv)
    return rest, _settings(parser, flags, rest)


def _fetch(argv: Sequence[str]) -> int:
    from server.commands.fetch import fetch

    configure("info", "text")
    return fetch(argv)


def _tune(argv: Sequence[str]) -> int:
    from server.commands.tune import tune

    return tune(argv)


def _split(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[dict[str, object], list[str]]:
    """Return our flags by name, and the arguments for vLLM, MODEL first.

    Prints help and exits with --help.
    """
    ours, rest = parser.parse_known_args([_dashed(word) for word in argv])
    flags = vars(ours)
    topic = flags.pop("help", None)
    if topic == "":
        parser.print_help()
    elif topic is not None:
        from server.vllm.flags import print_help

        print_help(topic)
    if topic is not None:
        parser.exit()
    return flags, rest


def _dashed(word: str) -> str:
    """Return one of our flags with dashes; vLLM also accepts `--api_key`."""
    flag, equals, value = word.partition("=")
    spelt = flag.replace("_", "-")
    name = spelt.removeprefix("--no-").removeprefix("--").replace("-", "_")
    known = flag.startswith("--") and name in ServerSettings.model_fields
    return f"{spelt}{equals}{value}" if known else word


def _settings(
    parser: argparse.ArgumentParser, flags: dict[str, object], rest: Sequence[str]
) -> ServerSettings:
    """Return the settings and configure the log; exit with 2 for an invalid command line."""
    try:
        settings = load_settings(flags, _config_file(rest))
    except (SettingsError, OSError) as error:
        parser.error(str(error))
    if not rest:
        parser.error("MODEL is missing: name a directory or a model on the Hugging Face hub")
    configure(settings.log_level, settings.log_format)
    return settings


def _config_file(argv: Sequence[str]) -> dict[str, object]:
    """Return our settings in vLLM's --config file."""
    probe = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    probe.add_argument("--config")
    path = probe.parse_known_args(argv)[0].config
    if path is None:
        return {}
    import yaml

    content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    named = {str(key).replace("-", "_"): value for key, value in content.items()}
    return {name: named[name] for name in _SHARED_WITH_VLLM if name in named}


def _run(
    settings: ServerSettings,
    engine_argv: list[str],
    joined: Callable[[Coroutine[Any, Any, int], str], Coroutine[Any, Any, int]] | None = None,
) -> int:
    """Serve until the end; `joined` combines the service with work that uses its URL."""
    from rbln_backend.host.process_life import outlive_readers
    from server.host.run_folder import run_folder

    outlive_readers()
    export_log_level(settings)
    export_service_name()
    try:
        listener = _listen(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise SystemExit(f"{_PROG}: cannot listen on {where}: {error}") from None
    if settings.engine_start == "forkserver":
        from server.engine.process import start_forkserver

        start_forkserver()
    with run_folder(settings.run_root) as run_dir:
        from asyncio import Runner

        import uvloop

        from server.engine.launch import VllmLauncher
        from server.service import serve

        launcher = VllmLauncher(engine_argv, settings, run_dir)
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
                raise SystemExit(f"{_PROG}: {error}") from None
    if launcher.building:
        # A thread still imports modules or waits for an engine; the interpreter's shutdown would
        # interfere with it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, in whose backlog clients wait from now on."""
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


def _process_start() -> float:
    """Return the start time of this process on the clock of `time.monotonic`."""
    stat = Path("/proc/self/stat").read_text(encoding="ascii")
    ticks = int(stat.rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


_COMMANDS = {
    "serve": (_serve, "serve a model over HTTP"),
    "check": (_check, "report whether a model can be served"),
    "compile": (_compile, "fill the compile cache ahead of time"),
    "batch": (_batch, "answer a file of requests"),
    "fetch": (_fetch, "download a small model by name"),
    "cache": (_cache, "list, check and move the compile cache"),
    "tune": (_tune, "suggest bucket sizes for recorded traffic"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in _COMMANDS:
        run, _ = _COMMANDS[args[0]]
        return run(args[1:])
    parser = argparse.ArgumentParser(
        prog=_PROG, description="Serve a model over the OpenAI API on RBLN devices."
    )
    parser.add_argument("--version", action="version", version=f"{_PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (_, about) in _COMMANDS.items():
        commands.add_parser(name, help=about, add_help=False)
    parser.parse_args(args)
    parser.print_help()
    return 2
