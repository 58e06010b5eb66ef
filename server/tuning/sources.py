"""Served work for a study: records or traces, and the buckets that they ran in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rbln_backend.api.settings import resolve
from rbln_backend.bucketing.engine_buckets import decode_bucket_table, prefill_chunk_table
from rbln_backend.bucketing.table import DEFAULT_CHUNK_TOKENS, DEFAULT_MAX_NUM_SEQS, BucketTable
from rbln_backend.bucketing.usage import PHASES, Usage, UsageFile
from server.tuning.search import fitting
from server.tuning.simulator import Request, Tables

_FOLDER = Path("rbln") / "usage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Steps of a record, or a trace of requests, with the current buckets."""

    name: str
    tables: Tables
    """Current buckets by phase."""
    usage: Usage = field(default_factory=Usage)
    requests: Sequence[Request] = ()
    left_out: int = 0
    """Requests of the trace that the engine would reject."""


def present_tables(
    decode: Sequence[int] | None, prefill: Sequence[int] | None, rows: int | None, chunk: int | None
) -> Tables:
    """Return the buckets of a server with these sizes, default ones for None.

    Raises `BucketError` and `ConfigError` for invalid sizes.
    """
    given: dict[str, Any] = {"prefill_chunk_buckets": list(prefill) if prefill else None}
    if decode:
        given["decode_batch_bucket_strategy"] = "manual"
        given["decode_batch_bucket_manual_buckets"] = list(decode)
    config = resolve({"rbln": given}, {}).config
    return {
        "prefill": prefill_chunk_table(config, chunk or max(prefill or (DEFAULT_CHUNK_TOKENS,))),
        "decode": decode_bucket_table(config, rows or max(decode or (DEFAULT_MAX_NUM_SEQS,))),
    }


def recorded_work(cache_root: Path | None, model: str | None) -> list[Work]:
    """Return the records of servers in the cache root, latest first.

    An unreadable record is reported on standard error and skipped.
    """
    root = cache_root or Path(resolve(None).config.cache_root)
    found = []
    paths = (root / _FOLDER).glob("*.json")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            usage = UsageFile(path).read()
        except (OSError, ValueError) as error:
            sys.stderr.write(f"rbln-serve tune: {path} is left out: {error}\n")
            continue
        # The digest tells configurations of one model apart: adapters, context and more.
        about, digest = usage.about, path.stem[:8]
        name = f"{about.get('model', '')} on {about.get('device', '')} ({digest})"
        if model is None or model in name:
            found += work_of(name, usage)
    return found


def work_of(name: str, usage: Usage) -> list[Work]:
    """Return the steps of a server with known buckets; empty if no step fits into them."""
    if not all(usage.about.get(f"{phase}_buckets") for phase in PHASES):
        return []
    tables = {phase: BucketTable(tuple(usage.about[f"{phase}_buckets"])) for phase in PHASES}
    for phase, ran in usage.phases.items():
        # Drop sizes that only an earlier engine allowed; its step times remain valid.
        ran.steps_by_size = fitting(ran.steps_by_size, tables[phase])
    return [Work(name=name, tables=tables, usage=usage)] if usage.steps else []
