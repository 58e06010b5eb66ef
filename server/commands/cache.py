"""`rbln-serve cache list|inspect|verify|export|import|prune`.

Exit codes: 0 success (inspect: a start would be warm), 1 failure or damaged entries, 2 invalid
command line, 3 (inspect, export of a model) an entry that a start needs is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rbln_backend import api
from rbln_backend.api.names import (
    MAX_BYTES,
    ArtifactStore,
    CacheKey,
    Contents,
    Entry,
    KernelFiles,
    StoreReport,
    above_bound,
    audit,
    collect,
    graph_store,
    is_intact,
    kernel_store,
    libraries,
    of_other_versions,
    read_archive,
    read_tree,
    resolve,
    unpack,
    unused_since,
    write_bundle,
    write_folder,
)
from rbln_backend.errors import BundleError, ConfigError, PlatformError
from rbln_backend.host.files import trusted_folder
from server.commands.check import reserved_stdout, with_config
from server.commands.flags import CommandParser
from server.frontend import LaunchError
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
    if takes_model and args.model is not None:
        args.model_argv, args.settings = model_flags([args.model, *rest])
    try:
        args.root = args.cache_root or default_root()
    except ConfigError as error:
        parser.error(str(error))
    run: Callable[[Namespace], int] = args.run
    return run(args)


def cache_parser() -> CommandParser:
    parser = CommandParser(
        prog=_PROG, description="List, check and move compiled graphs and kernels."
    )
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def begin(name: str, about: str, run: Callable[[Namespace], int]) -> Callable[..., object]:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(command=name, run=run)
        command.add_argument("--cache-root", type=_root, help="cache root [VLLM_CACHE_ROOT]")
        return command.add_argument

    as_json: dict[str, Any] = {"action": "store_true", "help": "print JSON"}
    add = begin("list", "list the stored entries", list_entries)
    add("--json", **as_json)
    add = begin("inspect", "show whether a start of a model would be warm", inspect)
    add("--json", **as_json)
    add("--model", required=True, help="MODEL; flags of `serve` may follow")
    add = begin("verify", "check size and SHA-256 of every entry", verify)
    add("--json", **as_json)
    add("--quarantine", action="store_true", help="move damaged entries to quarantine")
    add = begin("export", "write graphs and kernels to one file", export)
    add("file", type=Path, metavar="FILE", help="the file to write")
    add("--model", help="only the entries of this MODEL; flags of `serve` may follow")
    add("--no-kernels", action="store_true", help="export graphs only")
    add("--directory", action="store_true", help="write FILE as a folder")
    add = begin("import", "store the entries of an exported file", import_entries)
    add("file", type=Path, metavar="FILE", help="an exported file or folder")
    about = "expected digest; a match also permits kernels"
    add("--digest", type=_digest, metavar="sha256:HEX", help=about)
    about = "import kernels, which are native code, without --digest"
    add("--trust-kernels", action="store_true", help=about)
    add("--max-bytes", type=_size, metavar="SIZE", help="limit of the content")
    add = begin("prune", "remove entries by age, size or version", prune)
    about = "remove entries unused for more than N days"
    add("--keep-days", type=float, metavar="N", help=about)
    about = "remove the least recently used graphs above SIZE"
    add("--max-bytes", type=_size, metavar="SIZE", help=about)
    about = "remove entries that this version cannot use"
    add("--other-versions", action="store_true", help=about)
    add("--dry-run", action="store_true", help="only print what would be removed")
    add("--json", **as_json)
    return parser


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
            contents = _contents(args)
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
    out = sys.stdout
    out.write(
        f"{imported.graphs} graphs imported into {args.root}, {imported.graphs_present} were "
        "there\n"
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
            with trusted_folder(kernel_store(args.root)):
                pass
        except OSError as problem:
            out.write(f"servers will not run them: {problem}\n")
    sys.stdout.write(checks.report())
    return 0


def _survey(args: Namespace) -> StoreReport:
    """Return the store's report for a model. Raises `LaunchError`."""
    root = str(args.root)
    return with_config(args.model_argv, args.settings, lambda c, _: api.survey_store(c, root))


def _contents(args: Namespace) -> Contents:
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


def _fail(reason: str, code: int, command: str = "") -> int:
    sys.stderr.write(f"{_PROG}{command}: error: {reason}\n")
    return code


_ROW = "{:<32}  {:<12}  {:<28}  {:>9}  {:>10}\n"
_DAY_S = 86400.0
_MAX_NAME = 80


def list_entries(args: Namespace) -> int:
    """Print graphs and libraries, least recently used first."""
    entries, kernels = _store(args.root).entries(), libraries(kernel_store(args.root))
    if args.json:
        content = {"graphs": [_graph(e) for e in entries], "kernels": [_kernel(k) for k in kernels]}
        sys.stdout.write(json.dumps({"cache_root": str(args.root), **content}, indent=2) + "\n")
        return 0
    now = time.time()
    sys.stdout.write(_ROW.format("KEY", "GRAPH", "MODEL", "KB", "LAST USED"))
    for entry in entries:
        about = _graph(entry)
        used = _age(now - entry.last_used)
        size = f"{entry.size_bytes / 1000:.0f}"
        model = _printable(f"{about['architecture']} {about['dtype']}")
        graph = _printable(about["graph"])
        sys.stdout.write(_ROW.format(entry.key.digest, graph, model, size, used))
    for kernel in kernels:
        used, size = _age(now - kernel.last_used), f"{kernel.size_bytes / 1000:.0f}"
        target = _printable(kernel.target) or "unknown"
        sys.stdout.write(_ROW.format(kernel.key, "kernels", f"for {target}", size, used))
    total = _bytes(entries, kernels)
    sys.stdout.write(
        f"{len(entries)} graphs, {len(kernels)} kernel libraries, {total / 1e6:.1f} MB "
        f"in {args.root}\n"
    )
    return 0


def verify(args: Namespace) -> int:
    """Check every entry; return 1 if one is damaged."""
    store = _store(args.root, read_only=not args.quarantine)
    damaged, whole, checks = [], 0, GraphChecks()
    for digest, reason in audit(store.root, checks):
        if reason is None:
            whole += 1
            continue
        damaged.append({"key": digest, "kind": "graph", "reason": reason})
        if args.quarantine:
            store.quarantine(digest, reason)
    for kernel in libraries(kernel_store(args.root)):
        if is_intact(kernel.path):
            whole += 1
            continue
        reason = "the library does not match its record"
        damaged.append({"key": kernel.key, "kind": "kernels", "reason": reason})
        if args.quarantine:
            shutil.rmtree(kernel.path, ignore_errors=True)
    if args.json:
        result = {"ok": not damaged, "whole": whole, "damaged": damaged}
        sys.stdout.write(json.dumps({**result, "of_other_versions": checks.skipped}) + "\n")
        return 1 if damaged else 0
    for item in damaged:
        sys.stdout.write(f"damaged {item['kind']} {item['key']}: {item['reason']}\n")
    removed = ", moved away" if damaged and args.quarantine else ""
    sys.stdout.write(f"{whole} entries are whole, {len(damaged)} damaged{removed}\n")
    sys.stdout.write(checks.report())
    return 1 if damaged else 0


def prune(args: Namespace) -> int:
    """Remove the selected entries, or print them with --dry-run."""
    if args.keep_days is None and args.max_bytes is None and not args.other_versions:
        reason = "one of --keep-days, --max-bytes and --other-versions is required"
        return _fail(reason, 2, " prune")
    store = _store(args.root, read_only=args.dry_run)
    try:
        graphs, kernels = _to_remove(args, store.entries())
    except PlatformError as error:
        return _fail(str(error), 2, " prune")
    failed = 0
    if not args.dry_run:
        failed += sum(not store.evict(entry.key.digest) for entry in graphs)
        for kernel in kernels:
            shutil.rmtree(kernel.path, ignore_errors=True)
            failed += kernel.path.exists()
    if args.json:
        content = {"graphs": [_graph(e) for e in graphs], "kernels": [_kernel(k) for k in kernels]}
        sys.stdout.write(json.dumps({"dry_run": args.dry_run, **content}, indent=2) + "\n")
    else:
        verb = "would remove" if args.dry_run else "removed"
        for entry in graphs:
            graph = _printable(_graph(entry)["graph"])
            sys.stdout.write(f"{verb} {entry.key.digest} {graph}\n")
        for kernel in kernels:
            target = _printable(kernel.target) or "unknown"
            sys.stdout.write(f"{verb} {kernel.key} kernels for {target}\n")
        freed = _bytes(graphs, kernels)
        sys.stdout.write(f"{verb} {len(graphs) + len(kernels)} entries, {freed / 1e6:.1f} MB\n")
    return _fail(f"{failed} could not be removed", 1, " prune") if failed else 0


def _to_remove(args: Namespace, entries: Sequence[Entry]) -> tuple[list[Entry], list[KernelFiles]]:
    now = time.time()
    kernels = libraries(kernel_store(args.root))
    gone: dict[str, Entry] = {}
    gone_kernels: dict[str, KernelFiles] = {}
    if args.keep_days is not None:
        gone |= {e.key.digest: e for e in unused_since(entries, args.keep_days, now)}
        old = [k for k in kernels if now - k.last_used > args.keep_days * _DAY_S]
        gone_kernels |= {k.key: k for k in old}
    if args.other_versions:
        # Of this installation; imports the backend (seconds).
        with reserved_stdout():
            fields, usable = api.store_versions()
        gone |= {e.key.digest: e for e in of_other_versions(entries, fields)}
        gone_kernels |= {k.key: k for k in kernels if k.key not in usable}
    if args.max_bytes is not None:
        left = [entry for entry in entries if entry.key.digest not in gone]
        gone |= {e.key.digest: e for e in above_bound(left, args.max_bytes)}
    return list(gone.values()), list(gone_kernels.values())


def _store(root: Path, *, read_only: bool = True) -> ArtifactStore:
    return ArtifactStore(
        graph_store(root), max_bytes=sys.maxsize, read_only=read_only, on_event=lambda _: None
    )


def _graph(entry: Entry) -> dict[str, Any]:
    fields = entry.key.fields
    return {
        "key": entry.key.digest,
        "graph": f"{fields.get('phase')}-{fields.get('bucket')}",
        "architecture": fields.get("architecture"),
        "dtype": str(fields.get("dtype")).removeprefix("torch."),
        "max_model_len": fields.get("max_model_len"),
        "device": fields.get("device"),
        "vllm": fields.get("vllm"),
        "torch": fields.get("torch"),
        "size_bytes": entry.size_bytes,
        "created": entry.created,
        "last_used": entry.last_used,
    }


def _kernel(kernel: KernelFiles) -> dict[str, Any]:
    names = ("key", "target", "size_bytes", "last_used")
    return {name: getattr(kernel, name) for name in names}


def _printable(text: str) -> str:
    """Return a name from a bundle without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_NAME])


def _bytes(entries: Sequence[Entry], kernels: Sequence[KernelFiles]) -> int:
    return sum(entry.size_bytes for entry in entries) + sum(k.size_bytes for k in kernels)


def _age(seconds: float) -> str:
    for size, unit in ((_DAY_S, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


class GraphChecks:
    """Checks graphs and counts those of other versions, which cannot be checked here."""

    def __init__(self) -> None:
        self.skipped = 0

    def __call__(self, key: CacheKey, files: Mapping[str, bytes]) -> None:
        """Raise `CorruptArtifactError` for a graph that a start would not load."""
        self.skipped += not api.check_graph(key, files)

    def report(self) -> str:
        """Return a line about unchecked graphs, empty if all were checked."""
        if not self.skipped:
            return ""
        return (
            f"{self.skipped} graphs of other versions: only sizes and digests were checked, this "
            "version does not load them\n"
        )
