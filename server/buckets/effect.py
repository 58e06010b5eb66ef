"""The measured effect of other compiled sizes on the steps that ran in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rbln_backend.bucketing.search import LEAST_STEPS, NOISE, advise, fitting, ran_in
from rbln_backend.bucketing.step_times import StepTimes
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.usage import PHASES, PhaseUsage, Usage
from server.buckets.engine_buckets import Tables

LEAST_MEASURED_STEPS = 100
"""Steps of a phase after a change from which its effect is stated."""

Effect = dict[str, dict[str, Any] | None]


def effect_of(before: Usage, old: Tables, new: Tables, after: Usage) -> Effect:
    """Return by phase the steps since the change to `new`, and the share of step time it saved.

    `before` has the steps before the change in the sizes `old`, `after` those since. The same
    steps, by their real size, are counted in the old sizes at the times measured before; so the
    load may differ. A prompt would have been cut otherwise by the old chunks: for `prefill` the
    share is an estimate. None for a phase whose sizes are the same, or with too few steps on either
    side.
    """
    return {
        p: _effect(before.phases[p], list(old[p]), after.phases[p])
        if list(new[p]) != list(old[p])
        else None
        for p in PHASES
    }


def _effect(before: PhaseUsage, old: list[int], after: PhaseUsage) -> dict[str, Any] | None:
    known = before.mean_seconds(LEAST_STEPS)
    if not known or after.steps < LEAST_MEASURED_STEPS:
        return None
    table = BucketTable(tuple(old))
    then = ran_in(table, fitting(after.steps_by_size, table), StepTimes(known))
    saving = 1.0 - after.seconds / then.seconds if then.seconds > 0 else 0.0
    return {"steps": after.steps, "saving": round(saving, 4), "padding": round(after.padding, 4)}


def overall(shares: Mapping[str, Mapping[str, Any] | None], usage: Usage) -> float | None:
    """Return the `saving` of all phases together, weighted by the seconds of `usage`; or None."""
    weighed = [
        (share["saving"], usage.phases[phase].seconds)
        for phase, share in shares.items()
        if share is not None
    ]
    seconds = sum(weight for _, weight in weighed)
    return sum(s * weight for s, weight in weighed) / seconds if seconds > 0 else None


def is_worse(effect: Effect, usage: Usage) -> bool:
    """Return True if steps took longer after the change, beyond the noise of step times."""
    saving = overall(effect, usage)
    return saving is not None and saving < -NOISE


def since(total: Usage, earlier: Usage) -> Usage:
    """Return the counts that `total` has beyond `earlier`, of the same engine."""
    return Usage({p: total.phases[p].since(earlier.phases[p]) for p in PHASES})


def advice_on(usage: Usage, tables: Tables) -> tuple[Tables, dict[str, float], float]:
    """Return the tuner's sizes for the steps of `usage`, and the shares that they should save.

    The shares are by phase, and of all step time. A phase without advice keeps its sizes.
    """
    about = {f"{phase}_buckets": list(tables[phase]) for phase in PHASES}
    advice = advise(Usage(usage.phases, about))
    wanted = {p: list(a["suggested"]) if (a := advice[p]) else list(tables[p]) for p in PHASES}
    return wanted, savings(advice), overall(advice, usage) or 0.0


def savings(advice: Mapping[str, Mapping[str, Any] | None]) -> dict[str, float]:
    """Return the predicted shares of step time by phase."""
    return {phase: found["saving"] for phase, found in advice.items() if found is not None}
