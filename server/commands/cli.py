"""The command line: `rbln-serve COMMAND ...`.

`serve`, `check`, `compile` and `batch` take MODEL, our flags and vLLM's flags. Only our
own flags are parsed here, in milliseconds; vLLM's parser gets the rest once vLLM is imported, while
the server already listens. Exit codes: 0 success (serve: stopped by a signal), 1 failure or a model
that cannot run, 2 invalid command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from server import __version__
from server.commands.flags import (
    PROG,
    model_flags,
    nearest,
    server_parser,
    settings_of,
    split,
)
from server.commands.serving import check_secrets, hide_secrets, run_server
from server.observability.logging import configure
from server.settings import ServerSettings

Command = Callable[[Sequence[str]], int]


def _serve(argv: Sequence[str]) -> int:
    parser = server_parser("serve")
    flags, rest = split(parser, argv)
    settings = settings_of(parser, flags, rest)
    check_secrets(parser, settings)
    hide_secrets(argv)
    return run_server(settings, rest)


def _check(argv: Sequence[str]) -> int:
    parser = server_parser("check")
    _add_json(parser)
    flags, rest = split(parser, argv)
    as_json = bool(flags.pop("json", False))
    settings = settings_of(parser, flags, rest)
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
    as_json, given = bool(flags.pop("json", False)), flags.pop("isa", [])
    settings = settings_of(parser, flags, rest)
    from server.commands.check import compile_ahead

    assert isinstance(given, list)
    targets = [name for names in given for name in names.split(",")]
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
    from server.commands.batch import Work, answer_file, beside, paths_of

    settings = settings_of(parser, flags, [model, *rest])
    try:
        paths = paths_of((source, target))
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
