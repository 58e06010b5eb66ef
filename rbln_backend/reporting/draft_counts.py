"""Counts drafts on the metrics board; all label sets exist before the first step."""

from __future__ import annotations

from collections.abc import Iterable

from rbln_backend.reporting.stats import MetricsBoard


class DraftCounts:
    """What steps that check drafts checked, accepted and gained, by the size of their graph."""

    def __init__(self, board: MetricsBoard, sizes: Iterable[tuple[int, int]]) -> None:
        """``sizes``: requests and tokens of each, as they are compiled."""
        self._cells = {
            size: (
                board.counter("rbln_draft_tokens_total", bucket=_shown(size)),
                board.counter("rbln_draft_accepted_tokens_total", bucket=_shown(size)),
                board.counter("rbln_draft_expected_gain_total", bucket=_shown(size)),
                board.counter("rbln_draft_gain_total", bucket=_shown(size)),
            )
            for size in sizes
        }

    def record(
        self,
        size: tuple[int, int],
        *,
        checked: int,
        accepted: int,
        expected_gain: float,
        gain: float,
    ) -> None:
        """One step of a size that was announced; gains are times as many tokens a second."""
        for cell, amount in zip(
            self._cells[size], (checked, accepted, expected_gain, gain), strict=True
        ):
            cell.inc(amount)


def _shown(size: tuple[int, int]) -> str:
    requests, tokens = size
    return f"{requests}x{tokens}"
