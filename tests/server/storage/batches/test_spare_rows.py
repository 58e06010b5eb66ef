"""Numbers of lines that run beside client requests and without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rbln_backend.reports.metrics import MetricsBoard
from server.observability.metrics import ServerMetrics
from server.storage.batches import best_rows

BUCKETS = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        pytest.param({}, 8, id="nothing ran"),
        pytest.param({1: (900, 9.0), 8: (900, 18.0)}, 8, id="as it is mostly"),
        pytest.param({4: (900, 9.0), 8: (900, 27.0)}, 4, id="the largest takes thrice as long"),
        pytest.param({4: (900, 9.0), 8: (100, 3.0)}, 8, id="it ran too rarely to say"),
        pytest.param({4: (100, 1.0), 8: (900, 27.0)}, 8, id="the other one did"),
        pytest.param({4: (900, 9.0)}, 8, id="it never ran"),
        pytest.param({4: (900, 9.0), 8: (900, 19.0)}, 8, id="a difference that may be chance"),
        pytest.param({3: (900, 0.9), 8: (900, 18.0)}, 8, id="a bucket that is no more"),
    ],
)
def test_the_bucket_with_the_most_tokens_is_taken(
    times: dict[int, tuple[int, float]], best: int
) -> None:
    assert best_rows(BUCKETS, times) == best


def test_what_the_engines_ran_is_known(tmp_path: Path) -> None:
    metrics = ServerMetrics(tmp_path)
    assert metrics.decode_times() == {}
    for rank in (0, "replica"):
        board = MetricsBoard(tmp_path, rank)
        for bucket in (4, 8, 8):
            board.histogram("rbln_bucket_step_seconds", phase="decode", bucket=bucket).observe(0.5)
        board.histogram("rbln_bucket_step_seconds", phase="prefill", bucket=64).observe(9.0)
    assert metrics.decode_times() == {4: (2, 1.0), 8: (4, 2.0)}
