"""Where a study's work comes from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rbln_backend.bucketing.table import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    BucketTable,
    decode_bucket_table,
    prefill_chunk_table,
)
from rbln_backend.bucketing.usage import PHASES, PhaseUsage, Usage, UsageFile
from rbln_backend.config import RblnConfig
from rbln_backend.settings import resolve
from server.tuning.batchsize_log import read_log
from server.tuning.measure import Tables
from server.tuning.prometheus_range import Range, read_range
from server.tuning.study import Work
from server.tuning.trace import read_trace

_FOLDER = Path("rbln") / "usage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The present sizes where a source does not tell them; what is None is the default."""

    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    decode: Sequence[int] | None
    prefill: Sequence[int] | None

    def tables(self) -> dict[str, BucketTable]:
        """Raises `BucketError` for sizes that are no buckets."""
        rows = self.max_num_seqs or (max(self.decode) if self.decode else DEFAULT_MAX_NUM_SEQS)
        chunk = self.max_num_batched_tokens or (
            max(self.prefill) if self.prefill else DEFAULT_CHUNK_TOKENS
        )
        if self.decode:
            config = RblnConfig(
                decode_batch_bucket_strategy="manual",
                decode_batch_bucket_manual_buckets=tuple(self.decode),
                prefill_chunk_buckets=None if self.prefill is None else tuple(self.prefill),
            )
        else:
            prefill = None if self.prefill is None else tuple(self.prefill)
            config = RblnConfig(prefill_chunk_buckets=prefill)
        return {
            "prefill": prefill_chunk_table(config, chunk),
            "decode": decode_bucket_table(config, rows),
        }


def from_records(cache_root: Path | None, model: str | None) -> list[Work]:
    """The records of servers in the cache root; one that cannot be read is told and left out."""
    root = cache_root or Path(resolve(None).config.cache_root)
    found = []
    for path in sorted((root / _FOLDER).glob("*.json")):
        try:
            usage = UsageFile(path).read()
        except (OSError, ValueError) as error:
            sys.stderr.write(f"rbln-serve tune: {path} is left out: {error}\n")
            continue
        name = str(usage.about.get("model", ""))
        if model is None or model in name:
            work = _of_usage(f"{name} on {usage.about.get('device', '')}", usage)
            found += [] if work is None else [work]
    return found


def from_prometheus(asked: Range) -> Work:
    """What Prometheus scraped; the labels say which buckets there are."""
    work = _of_usage(f"{asked.url} {asked.selector}".strip(), read_range(asked))
    assert work is not None
    return work


def from_log(path: Path, sizes: Sizes) -> Work:
    """What vLLM logged, on whatever device."""
    tables = sizes.tables()
    usage = read_log(path, tables["decode"].largest, tables["prefill"].largest)
    return Work(name=str(path), tables=tables, usage=usage)


def from_trace(path: Path, sizes: Sizes) -> Work:
    """Requests by time."""
    return Work(name=str(path), tables=sizes.tables(), usage=Usage(), arrivals=read_trace(path))


def _of_usage(name: str, usage: Usage) -> Work | None:
    """None where nothing fitting was recorded."""
    tables = {}
    for phase in PHASES:
        sizes = usage.about.get(f"{phase}_buckets")
        if not sizes:
            return None
        tables[phase] = BucketTable(tuple(sizes))
    fitting = Usage(_fitting(usage.phases, tables), dict(usage.about))
    return Work(name=name, tables=tables, usage=fitting) if fitting.steps else None


def _fitting(phases: Mapping[str, PhaseUsage], tables: Tables) -> dict[str, PhaseUsage]:
    """Without sizes that only an earlier engine allowed; its step times still hold."""
    return {
        phase: PhaseUsage(
            usage.fitting(tables[phase].largest),
            dict(usage.steps_by_bucket),
            dict(usage.seconds_by_bucket),
        )
        for phase, usage in phases.items()
    }
