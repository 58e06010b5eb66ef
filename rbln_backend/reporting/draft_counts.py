"""Metrics of drafts; all label sets exist before the first step."""

from __future__ import annotations

from collections.abc import Iterable

from rbln_backend.reporting.metric_cells import CounterHandle
from rbln_backend.reporting.stats import MetricsBoard

_NAMES = (
    "rbln_draft_tokens_total",
    "rbln_draft_accepted_tokens_total",
    "rbln_draft_gain_total",
)


class DraftCounts:
    """Checked and accepted drafts, and gains, by the size of the verify graph."""

    def __init__(self, board: MetricsBoard, sizes: Iterable[tuple[int, int]]) -> None:
        """``sizes`` are the compiled ones: requests, and tokens of each."""
        self._cells: dict[tuple[int, int], tuple[CounterHandle, ...]] = {
            size: tuple(board.counter(name, bucket=_shown(size)) for name in _NAMES)
            for size in sizes
        }

    def record(
        self,
        size: tuple[int, int],
        *,
        checked: int,
        accepted: int,
        gain: float,
    ) -> None:
        """Count one step; ``gain`` is the ratio of tokens per second with and without drafts."""
        for cell, amount in zip(self._cells[size], (checked, accepted, gain), strict=True):
            cell.inc(amount)


def _shown(size: tuple[int, int]) -> str:
    requests, tokens = size
    return f"{requests}x{tokens}"
