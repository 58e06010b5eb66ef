"""Differences between two runners at every generated position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rbln_backend.parity.job import Answer, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionDelta:
    """Differences of log-probabilities at one position, over the tokens that both sides have."""

    overlap: int
    outliers: int
    """|difference| >= eps."""
    max_delta: float
    mean_delta: float
    pearson: float
    """NaN for fewer than two tokens, or for equal values of all tokens on one side."""
    same_best: bool
    margin: float
    """The reference's best log-probability less its second best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelta:
    """Differences of one prompt at every position, each after the same tokens on both sides."""

    positions: tuple[PositionDelta, ...]
    first_divergence: int | None
    """Position at which the free continuations differ; None if they are equal."""

    @property
    def divergence_is_a_tie(self) -> bool:
        """True if the reference's margin is at most the difference between the runners."""
        if self.first_divergence is None or not self.positions:
            return False
        position = self.positions[self.first_divergence]
        return position.margin <= 2 * position.max_delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary over all prompts of two sides; ``None`` without compared log-probabilities."""

    prompts: int
    positions: int
    same_tokens: int
    """Prompts with equal free continuations."""
    ties: int
    """Prompts that differ at a tie of the reference."""
    max_delta: float | None
    mean_delta: float | None
    min_pearson: float | None
    outliers: int


def summarize(deltas: Sequence[PromptDelta]) -> Summary:
    """Summarize the prompts of two sides."""
    positions = [position for delta in deltas for position in delta.positions]
    overlaps = [position.overlap for position in positions]
    total = sum(p.mean_delta * p.overlap for p in positions if p.overlap)
    return Summary(
        prompts=len(deltas),
        positions=len(positions),
        same_tokens=sum(delta.first_divergence is None for delta in deltas),
        ties=sum(delta.divergence_is_a_tie for delta in deltas),
        max_delta=max((p.max_delta for p in positions), default=None),
        mean_delta=total / sum(overlaps) if any(overlaps) else None,
        min_pearson=min((p.pearson for p in positions if not math.isnan(p.pearson)), default=None),
        outliers=sum(p.outliers for p in positions),
    )


def compare(reference: Answer, other: Answer, eps: float) -> PromptDelta:
    """Compare two answers to one prompt; ``other`` followed the reference's tokens."""
    count = min(len(reference.top_ids), len(other.top_ids))
    has_logprobs = count > 0 and reference.top_ids.shape[1] > 0 and other.top_ids.shape[1] > 0
    positions = (
        tuple(
            compare_position(
                *(reference.top_ids[at], reference.logprobs[at]),
                *(other.top_ids[at], other.logprobs[at]),
                eps,
            )
            for at in range(count)
        )
        if has_logprobs
        else ()
    )
    return PromptDelta(positions=positions, first_divergence=_first_divergence(reference, other))


def _first_divergence(reference: Answer, other: Answer) -> int | None:
    count = min(len(reference.token_ids), len(other.token_ids))
    differs = np.nonzero(reference.token_ids[:count] != other.token_ids[:count])[0]
    return int(differs[0]) if len(differs) else None


def compare_position(
    ref_ids: IntArray, ref: FloatArray, ids: IntArray, values: FloatArray, eps: float
) -> PositionDelta:
    """Compare ``ref_ids``, ``ref`` [N] with ``ids``, ``values`` [M], likeliest first."""
    _, at_ref, at = np.intersect1d(ref_ids, ids, return_indices=True)
    a, b = ref[at_ref].astype(np.float64), values[at].astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    delta = np.abs(a - b)
    return PositionDelta(
        overlap=len(delta),
        outliers=int((delta >= eps).sum()),
        max_delta=float(delta.max(initial=0.0)),
        mean_delta=float(delta.mean()) if len(delta) else float("nan"),
        pearson=_pearson(a, b),
        same_best=bool(ref_ids[0] == ids[0]),
        margin=float(ref[0] - ref[1]) if len(ref) > 1 else float("inf"),
    )


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
