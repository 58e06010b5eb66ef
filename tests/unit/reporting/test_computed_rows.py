"""What the boards of a host say of the work for requests."""

from __future__ import annotations

from pathlib import Path

from rbln_backend.reports.metrics import MetricsBoard, computed_rows

ROWS = "rbln_bucket_useful_rows_total"


def test_rows_of_all_engines_add_up(tmp_path: Path) -> None:
    assert computed_rows(tmp_path, 1) is None
    boards = [MetricsBoard(tmp_path, rank) for rank in range(3)]
    # The third is of a rank whose engine's steps another rank counts.
    boards[2].counter("rbln_recompiles_after_warmup_total", kind="decode").inc()
    counters = [
        board.counter(ROWS, phase=phase, bucket="4")
        for board in boards[:2]
        for phase in ("decode", "prefill")
    ]
    assert computed_rows(tmp_path, 2) == 0.0
    for number, counter in enumerate(counters):
        counter.inc(number)
    boards[0].counter("rbln_bucket_padded_rows_total", phase="decode", bucket="4").inc(50)
    assert computed_rows(tmp_path, 2) == 6.0


def test_nothing_is_known_where_an_engine_is_on_another_host(tmp_path: Path) -> None:
    MetricsBoard(tmp_path, 0).counter(ROWS, phase="decode", bucket="4").inc()
    assert computed_rows(tmp_path, 1) == 1.0
    assert computed_rows(tmp_path, 2) is None
