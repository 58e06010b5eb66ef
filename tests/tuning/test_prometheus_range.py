"""What a real Prometheus kept of a server becomes steps by size."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from server.tuning.prometheus_range import read_range
from tests.debian_tools import debian_tool
from tests.operators.prometheus_process import Prometheus

STEP_S, SAMPLES = 15, 9
# Between two samples: 30 steps of 3 rows in bucket 4, 10 more that check drafts, and 10 chunks of
# 20 tokens in 32.
ADDED = {
    'rbln_bucket_steps_total{phase="decode",bucket="4"}': 30,
    'rbln_bucket_step_seconds_sum{phase="decode",bucket="4"}': 0.3,
    'rbln_bucket_useful_rows_total{phase="decode",bucket="4"}': 90,
    'rbln_bucket_steps_total{phase="verify",bucket="4x2"}': 10,
    'rbln_bucket_step_seconds_sum{phase="verify",bucket="4x2"}': 0.2,
    'rbln_bucket_useful_rows_total{phase="verify",bucket="4x2"}': 30,
    'rbln_bucket_steps_total{phase="decode",bucket="8"}': 0,
    'rbln_bucket_steps_total{phase="prefill",bucket="32"}': 10,
    'rbln_bucket_useful_rows_total{phase="prefill",bucket="32"}': 10,
    'rbln_bucket_steps_total{phase="pooling",bucket="32"}': 10,
    'rbln_bucket_step_seconds_sum{phase="prefill",bucket="32"}': 0.5,
    'rbln_prefill_useful_tokens_total{chunk="32"}': 200,
}
# The server restarts before this sample: its counters begin anew.
RESTART = 4


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float]]:
    """A Prometheus over blocks that were written for it, and the time of the first sample."""
    folder = tmp_path_factory.mktemp("prometheus")
    first = time.time() // STEP_S * STEP_S - 3 * 3600
    lines = []
    for series, added in ADDED.items():
        name, labels = series.rstrip("}").split("{")
        for sample in range(SAMPLES):
            since = sample if sample < RESTART else sample - RESTART + 1
            at = first + sample * STEP_S
            lines.append(f'{name}{{{labels},job="rbln-serve"}} {since * added} {at:.0f}')
    text = folder / "metrics.txt"
    text.write_text("\n".join(lines) + "\n# EOF\n")
    data = folder / "prometheus" / "data"
    command = [
        debian_tool("promtool"),
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        str(text),
        str(data),
    ]
    data.parent.mkdir()
    subprocess.run(command, check=True, capture_output=True)
    with Prometheus(folder / "prometheus", {}) as running:
        yield running.url, first


def test_counters_become_steps_by_their_mean_size(prometheus: tuple[str, float]) -> None:
    url, first = prometheus
    end = first + (SAMPLES - 1) * STEP_S
    usage = read_range(url, 'job="rbln-serve"', first, end, STEP_S)
    intervals = SAMPLES - 1
    decode, prefill = usage.phases["decode"], usage.phases["prefill"]
    assert decode.steps_by_size == {3: 40 * intervals}
    assert decode.mean_seconds() == pytest.approx({4: 0.0125})
    assert prefill.steps_by_size == {20: 10 * intervals}
    assert usage.about["decode_buckets"] == [4, 8]
    assert usage.about["prefill_buckets"] == [32]


def test_a_server_that_is_not_there_is_said(prometheus: tuple[str, float]) -> None:
    url, first = prometheus
    with pytest.raises(ValueError, match="has no steps of a server with"):
        read_range(url, 'job="other"', first, first + 60, STEP_S)
    with pytest.raises(ValueError, match="refuses"):
        read_range(url, "job=", first, first + 60, STEP_S)
