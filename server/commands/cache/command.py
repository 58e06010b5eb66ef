"""`rbln-serve cache list|inspect|verify|export|import|prune`: the flags of each.

Exit codes: 0 success (inspect: a start would be warm), 1 failure or damaged entries, 2 invalid
command line, 3 (inspect, export of a model) an entry that a start needs is missing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rbln_backend.errors import ConfigError
from server.commands.command_line.command_parser import CommandParser
from server.settings import ServerSettings

_PROG = "rbln-serve cache"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SIZE = re.compile(r"(\d+)([KMG]i?B?|B)?", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

ModelFlags = Callable[[Sequence[str]], tuple[list[str], ServerSettings]]
"""Splits MODEL and the flags of `serve` into vLLM's arguments and our settings."""


def cache(argv: Sequence[str], model_flags: ModelFlags) -> int:
    """Run one of the commands and return the exit code."""
    parser = cache_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    takes_model = "model" in args
    if rest and not (takes_model and args.model is not None):
        parser.reject(rest)
    from server.commands.cache import bundles, upkeep

    if takes_model and args.model is not None:
        args.model_argv, args.settings = model_flags([args.model, *rest])
    try:
        args.root = args.cache_root or bundles.default_root()
    except ConfigError as error:
        parser.error(str(error))
    run: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": upkeep.list_entries,
        "inspect": bundles.inspect,
        "verify": upkeep.verify,
        "export": bundles.export,
        "import": bundles.import_entries,
        "prune": upkeep.prune,
    }
    return run[args.command](args)


def cache_parser() -> CommandParser:
    """Return the parser of the commands."""
    parser = CommandParser(
        prog=_PROG, description="List, check and move compiled graphs and kernels."
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, about, add_flags in (
        ("list", "list the stored entries", _json_flag),
        ("inspect", "show whether a start of a model would be warm", _inspect_flags),
        ("verify", "check size and SHA-256 of every entry", _verify_flags),
        ("export", "write graphs and kernels to one file", _export_flags),
        ("import", "store the entries of an exported file", _import_flags),
        ("prune", "remove entries by age, size or version", _prune_flags),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(command=name)
        command.add_argument("--cache-root", type=_root, help="cache root [VLLM_CACHE_ROOT]")
        add_flags(command)
    return parser


def _inspect_flags(command: argparse.ArgumentParser) -> None:
    _json_flag(command)
    command.add_argument("--model", required=True, help="MODEL; flags of `serve` may follow")


def _verify_flags(command: argparse.ArgumentParser) -> None:
    _json_flag(command)
    command.add_argument(
        "--quarantine", action="store_true", help="move damaged entries to quarantine"
    )


def _export_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    command.add_argument(
        "--model", help="only the entries of this MODEL; flags of `serve` may follow"
    )
    command.add_argument("--no-kernels", action="store_true", help="export graphs only")
    command.add_argument("--directory", action="store_true", help="write FILE as a folder")


def _import_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="an exported file or folder")
    command.add_argument(
        "--digest",
        type=_digest,
        metavar="sha256:HEX",
        help="expected digest; a match also permits kernels",
    )
    command.add_argument(
        "--trust-kernels",
        action="store_true",
        help="import kernels, which are native code, without --digest",
    )
    command.add_argument("--max-bytes", type=_size, metavar="SIZE", help="limit of the content")


def _prune_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--keep-days", type=float, metavar="N", help="remove entries unused for more than N days"
    )
    command.add_argument(
        "--max-bytes",
        type=_size,
        metavar="SIZE",
        help="remove the least recently used graphs above SIZE",
    )
    command.add_argument(
        "--other-versions", action="store_true", help="remove entries that this version cannot use"
    )
    command.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    _json_flag(command)


def _json_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def _root(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be sha256: and 64 hexadecimal digits, got {text!r}")
    return text


def _size(text: str) -> int:
    """Parse a number of bytes with an optional unit K, M or G."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 500M or 2G, got {text!r}")
    return int(match[1]) * _UNITS[(match[2] or "")[:1].upper()]
