"""`rbln-serve cache inspect|export|import`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rbln_backend import api
from rbln_backend.api.settings import resolve
from rbln_backend.api.store import (
    MAX_BYTES,
    Contents,
    Imported,
    collect,
    kernel_store,
    read_archive,
    read_tree,
    unpack,
    write_bundle,
    write_folder,
)
from rbln_backend.errors import BundleError
from rbln_backend.host.trusted_files import trusted_folder
from server.commands.graph_checks import GraphChecks
from server.commands.stdout import reserved_stdout
from server.commands.without_engine import with_config
from server.frontend import LaunchError

if TYPE_CHECKING:
    from rbln_backend.api.reports import StoreReport

COLD = 3
"""Exit code: an entry that a start needs is missing."""


def default_root() -> Path:
    """Return the servers' cache root."""
    return Path(resolve(None).config.cache_root)


def inspect(args: Namespace) -> int:
    """Print whether a start would be warm, and the graphs that it would compile."""
    with reserved_stdout() as out:
        try:
            report = _survey(args)
        except LaunchError as error:
            return _fail(str(error), error.exit_code)
        if args.json:
            out.write(json.dumps(report.to_dict()) + "\n")
        else:
            out.writelines(f"{line}\n" for line in report.lines())
    return 0 if report.is_warm else COLD


def export(args: Namespace) -> int:
    """Write a bundle and print its digest."""
    with reserved_stdout() as out:
        try:
            contents = _chosen(args)
            if not contents.graphs and not contents.kernels:
                raise BundleError(f"nothing is stored in {args.root}; see --cache-root")
            write = write_folder if args.directory else write_bundle
            digest = write(args.file, contents)
        except LaunchError as error:
            return _fail(str(error), error.exit_code)
        except (BundleError, OSError) as error:
            return _fail(str(error), 1)
        out.write(f"sha256:{digest}  {args.file}\n")
    sys.stderr.write(f"{len(contents.graphs)} graphs, {len(contents.kernels)} kernel libraries\n")
    return 0


def import_entries(args: Namespace) -> int:
    """Import a bundle and print the number of new entries."""
    limit, checks = args.max_bytes or MAX_BYTES, GraphChecks()
    try:
        read = read_tree if args.file.is_dir() else read_archive
        files, digest = read(args.file, max_bytes=limit)
        if args.digest not in (None, f"sha256:{digest}"):
            raise BundleError(f"{args.file} has the digest sha256:{digest}, not {args.digest}")
        contents = Contents.from_files(files, checks)
        imported = unpack(
            contents,
            args.root,
            max_bytes=resolve(None).config.cache_max_bytes,
            with_kernels=args.trust_kernels or args.digest is not None,
        )
    except (BundleError, OSError) as error:
        return _fail(str(error), 1)
    _print_imported(imported, args.root, sys.stdout)
    sys.stdout.write(checks.report())
    return 0


def _print_imported(imported: Imported, root: Path, out: TextIO) -> None:
    out.write(
        f"{imported.graphs} graphs imported into {root}, {imported.graphs_present} were there\n"
    )
    if imported.kernels_left_out:
        out.write(
            f"{imported.kernels_left_out} kernel libraries left out: they are code; "
            "--digest or --trust-kernels takes them, else the first start builds its own\n"
        )
    elif imported.kernels or imported.kernels_present:
        out.write(
            f"{imported.kernels} kernel libraries imported, {imported.kernels_present} were there\n"
        )
        try:
            with trusted_folder(kernel_store(root)):
                pass
        except OSError as error:
            out.write(f"servers will not run them: {error}\n")


def _survey(args: Namespace) -> StoreReport:
    """Return the store's report for a model. Raises `LaunchError`."""
    root = str(args.root)
    return with_config(args.model_argv, args.settings, lambda c, _: api.survey_store(c, root))


def _chosen(args: Namespace) -> Contents:
    if args.model is None:
        return collect(args.root, GraphChecks(), kernel_keys=() if args.no_kernels else None)
    report = _survey(args)
    if report.to_compile:
        raise LaunchError(
            f"{len(report.to_compile)} of {len(report.graphs)} graphs are not stored: "
            f"{', '.join(report.to_compile)}; run `rbln-serve compile` with the same flags first",
            exit_code=COLD,
        )
    return collect(
        args.root,
        GraphChecks(),
        digests={graph.digest for graph in report.graphs},
        kernel_keys=() if args.no_kernels else report.kernels.keys,
    )


def _fail(reason: str, code: int) -> int:
    sys.stderr.write(f"rbln-serve cache: error: {reason}\n")
    return code
