"""The figures of a pair of sides over all positions; the same in every report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rbln_backend.parity.positions import PositionDelta, PromptDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """``None`` where no log-probabilities were compared."""

    prompts: int
    positions: int
    same_tokens: int
    """Prompts whose free continuations are the same."""
    ties: int
    """Prompts that part where the reference itself is undecided."""
    max_delta: float | None
    mean_delta: float | None
    min_pearson: float | None
    outliers: int


def summarize(deltas: Sequence[PromptDelta]) -> Summary:
    """Sum up the prompts of one pair of sides."""
    positions = [position for delta in deltas for position in delta.positions]
    return Summary(
        prompts=len(deltas),
        positions=len(positions),
        same_tokens=sum(delta.first_divergence is None for delta in deltas),
        ties=sum(delta.divergence_is_a_tie for delta in deltas),
        max_delta=max((p.max_delta for p in positions), default=None),
        mean_delta=_mean(positions),
        min_pearson=min((p.pearson for p in positions if not math.isnan(p.pearson)), default=None),
        outliers=sum(p.outliers for p in positions),
    )


def _mean(positions: Sequence[PositionDelta]) -> float | None:
    tokens = sum(p.overlap for p in positions)
    if not tokens:
        return None
    return sum(p.mean_delta * p.overlap for p in positions if p.overlap) / tokens
