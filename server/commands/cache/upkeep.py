"""`rbln-serve cache list|verify|prune`, the commands that need no model."""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rbln_backend import api
from rbln_backend.api.store import (
    ArtifactStore,
    Entry,
    KernelFiles,
    above_bound,
    audit,
    graph_store,
    is_intact,
    kernel_store,
    libraries,
    of_other_versions,
    unused_since,
)
from rbln_backend.errors import PlatformError
from server.commands.graph_checks import GraphChecks
from server.commands.stdout import reserved_stdout

_ROW = "{:<32}  {:<12}  {:<28}  {:>9}  {:>10}\n"
_DAY_S = 86400.0
_MAX_NAME = 80


def list_entries(args: Namespace) -> int:
    """Print graphs and libraries, least recently used first."""
    entries, kernels = _store(args.root).entries(), libraries(kernel_store(args.root))
    if args.json:
        found = {"graphs": [_graph(e) for e in entries], "kernels": [_kernel(k) for k in kernels]}
        sys.stdout.write(json.dumps({"cache_root": str(args.root), **found}, indent=2) + "\n")
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
        found = {"ok": not damaged, "whole": whole, "damaged": damaged}
        sys.stdout.write(json.dumps({**found, "of_other_versions": checks.skipped}) + "\n")
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
        sys.stderr.write(
            "rbln-serve cache prune: error: one of --keep-days, --max-bytes and --other-versions "
            "is required\n"
        )
        return 2
    store = _store(args.root, read_only=args.dry_run)
    try:
        graphs, kernels = _chosen(args, store.entries())
    except PlatformError as error:
        sys.stderr.write(f"rbln-serve cache prune: error: {error}\n")
        return 2
    failed = 0
    if not args.dry_run:
        failed += sum(not store.evict(entry.key.digest) for entry in graphs)
        failed += sum(not _remove(kernel.path) for kernel in kernels)
    if args.json:
        found = {"graphs": [_graph(e) for e in graphs], "kernels": [_kernel(k) for k in kernels]}
        sys.stdout.write(json.dumps({"dry_run": args.dry_run, **found}, indent=2) + "\n")
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
    if failed:
        sys.stderr.write(f"rbln-serve cache prune: error: {failed} could not be removed\n")
    return 1 if failed else 0


def _chosen(args: Namespace, entries: Sequence[Entry]) -> tuple[list[Entry], list[KernelFiles]]:
    now = time.time()
    kernels = libraries(kernel_store(args.root))
    gone: dict[str, Entry] = {}
    gone_kernels: dict[str, KernelFiles] = {}
    if args.keep_days is not None:
        gone |= {e.key.digest: e for e in unused_since(entries, args.keep_days, now)}
        old = [k for k in kernels if now - k.last_used > args.keep_days * _DAY_S]
        gone_kernels |= {k.key: k for k in old}
    if args.other_versions:
        fields, usable = _versions()
        gone |= {e.key.digest: e for e in of_other_versions(entries, fields)}
        gone_kernels |= {k.key: k for k in kernels if k.key not in usable}
    if args.max_bytes is not None:
        left = [entry for entry in entries if entry.key.digest not in gone]
        gone |= {e.key.digest: e for e in above_bound(left, args.max_bytes)}
    return list(gone.values()), list(gone_kernels.values())


def _versions() -> tuple[dict[str, object], frozenset[str]]:
    """Return the fields and kernel keys of this installation; imports the backend (seconds)."""
    with reserved_stdout():
        fields, keys = api.store_versions()
    return fields, frozenset(keys)


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
    return {
        "key": kernel.key,
        "target": kernel.target,
        "size_bytes": kernel.size_bytes,
        "last_used": kernel.last_used,
    }


def _printable(text: str) -> str:
    """Return a name from a bundle without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_NAME])


def _bytes(entries: Sequence[Entry], kernels: Sequence[KernelFiles]) -> int:
    return sum(entry.size_bytes for entry in entries) + sum(k.size_bytes for k in kernels)


def _remove(path: Path) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _age(seconds: float) -> str:
    for size, unit in ((_DAY_S, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
