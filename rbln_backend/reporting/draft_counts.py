"""Counts drafts on the metrics board; all label sets exist before the first step."""

from __future__ import annotations

from collections.abc import Iterable

from rbln_backend.reporting.stats import MetricsBoard


class DraftCounts:
    """What steps that check drafts checked and accepted, by the size of their graph."""

    def __init__(self, board: MetricsBoard, sizes: Iterable[tuple[int, int]]) -> None:
        """``sizes``: requests and tokens of each, as they are compiled."""
        self._cells = {
            size: (
                board.counter("rbln_draft_tokens_total", bucket=_shown(size)),
                board.counter("rbln_draft_accepted_tokens_total", bucket=_shown(size)),
            )
            for size in sizes
        }

    def record(self, size: tuple[int, int], checked: int, accepted: int) -> None:
        """One step of a size that was announced."""
        of_checked, of_accepted = self._cells[size]
        of_checked.inc(checked)
        of_accepted.inc(accepted)


def _shown(size: tuple[int, int]) -> str:
    requests, tokens = size
    return f"{requests}x{tokens}"
