"""Verdict of a comparison: the limits that it exceeds, with positions and values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rbln_backend.parity.options import Limits
from rbln_backend.parity.positions import PositionDelta, PromptDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A limit that a prompt exceeds, and the first position that does."""

    prompt: int
    position: int
    reason: str

    def __str__(self) -> str:
        return f"prompt {self.prompt}, position {self.position}: {self.reason}"


def judge(deltas: Sequence[PromptDelta], limits: Limits) -> list[Failure]:
    """Return the failures, at most one per prompt and limit."""
    failures = []
    for index, delta in enumerate(deltas):
        seen: set[str] = set()
        for position, kind, reason in _broken(delta, limits):
            if kind not in seen:
                seen.add(kind)
                failures.append(Failure(prompt=index, position=position, reason=reason))
    return failures


def _broken(delta: PromptDelta, limits: Limits) -> Iterator[tuple[int, str, str]]:
    for index, position in enumerate(delta.positions):
        for kind, reason in _of_position(position, limits):
            yield index, kind, reason
    at = delta.first_divergence
    if at is None or (delta.positions and delta.divergence_is_a_tie):
        return
    detail = ""
    if delta.positions:
        position = delta.positions[at]
        detail = f": the reference's margin is {position.margin:.3g}, "
        detail += f"the largest difference {position.max_delta:.3g}"
    yield at, "token", "another token where the reference was decided" + detail


def _of_position(position: PositionDelta, limits: Limits) -> Iterator[tuple[str, str]]:
    if position.overlap == 0:
        yield "overlap", "the sides name no token in common"
        return
    if not math.isnan(position.pearson) and position.pearson < limits.min_pearson:
        yield "pearson", f"Pearson {position.pearson:.4f} is below {limits.min_pearson}"
    if position.mean_delta > limits.max_mean_delta:
        yield "mean", f"mean |delta| {position.mean_delta:.4f} is above {limits.max_mean_delta}"
    share = position.outliers / position.overlap
    if share > limits.max_outlier_share:
        yield (
            "outliers",
            (
                f"{position.outliers} of {position.overlap} tokens differ by {limits.eps} or more, "
                f"above a share of {limits.max_outlier_share}"
            ),
        )
