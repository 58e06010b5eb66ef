"""Drafts are counted by the size of the graph that checked them."""

from __future__ import annotations

from rbln_backend.reports.metrics import DraftCounts, MetricsBoard


def test_drafts_are_counted_by_size() -> None:
    board = MetricsBoard(None, 0)
    counts = DraftCounts(board, [(1, 4), (8, 4)])
    counts.record((8, 4), checked=20, accepted=7, gain=1.25)
    counts.record((8, 4), checked=10, accepted=0, gain=0.5)
    assert board.value("rbln_draft_tokens_total", bucket="8x4") == 30
    assert board.value("rbln_draft_accepted_tokens_total", bucket="8x4") == 7
    assert board.value("rbln_draft_gain_total", bucket="8x4") == 1.75
    assert board.value("rbln_draft_tokens_total", bucket="1x4") == 0
