"""What the tuner says of a record of bucket use, as JSON for people and programs."""

from __future__ import annotations

from typing import Any

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import StepTimes, padding_share, suggest_buckets
from rbln_backend.bucketing.usage import PHASES, Usage

LIMITS = {"prefill": 6, "decode": 32}
"""Most graphs of a phase that are suggested unless asked otherwise: as many as by default."""


def advise(usage: Usage, limits: dict[str, int] | None = None) -> dict[str, Any]:
    """Return by phase the present and the suggested sizes, and what the change would save.

    `saving` is a share of the steps' time, 0 to 1, predicted from mean step times; a phase of which
    nothing fitting is recorded is null. Raises `BucketError` for a limit below 1.
    """
    return {
        phase: _phase(usage, phase, (limits or LIMITS).get(phase, LIMITS[phase]))
        for phase in PHASES
    }


def _phase(usage: Usage, phase: str, limit: int) -> dict[str, Any] | None:
    recorded = usage.phases[phase]
    sizes = usage.about.get(f"{phase}_buckets")
    if not sizes:
        return None
    table = BucketTable(tuple(sizes))
    counts = recorded.fitting(table.largest)
    if not counts:
        return None
    found = suggest_buckets(counts, StepTimes(recorded.mean_seconds()), table, limit)
    return {
        "steps": found.steps,
        "current": list(table.sizes),
        "suggested": list(found.buckets),
        "saving": round(found.saving, 4),
        "padding_now": round(padding_share(counts, table), 4),
        "padding_then": round(padding_share(counts, BucketTable(found.buckets)), 4),
        "setting": _SETTINGS[phase].format(sizes=list(found.buckets)),
    }


_SETTINGS = {
    "prefill": '--additional-config \'{{"rbln": {{"prefill_chunk_buckets": {sizes}}}}}\'',
    "decode": '--additional-config \'{{"rbln": {{"decode_batch_bucket_strategy": "manual", '
    '"decode_batch_bucket_manual_buckets": {sizes}}}}}\'',
}
