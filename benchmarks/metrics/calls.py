"""Seconds of single calls that record metrics, and of a scrape, on files of a service's form."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Sequence
from pathlib import Path

_REPEATS = 40
_LEAST_S = 0.005
A_STEP = "a decode step"
A_GAUGE = "a gauge (KV blocks, one a step and group)"


def time_calls(run_dir: Path, decode_buckets: Sequence[int]) -> dict[str, float]:
    """Return the seconds of a call, by what it does, on boards in `run_dir`."""
    from rbln_backend.core import GraphSpec, Phase
    from rbln_backend.reporting.stats import MetricsBoard
    from rbln_backend.worker.step.metrics import StepMetrics
    from server.observability.metrics import ServerMetrics

    board, server = MetricsBoard(run_dir, 0), ServerMetrics(run_dir)
    decodes = [GraphSpec.of(Phase.DECODE, size) for size in decode_buckets]
    chunk = GraphSpec.of(Phase.PREFILL, 128)
    steps = StepMetrics(board, [*decodes, chunk])
    gauge = MetricsBoard(run_dir, "scheduler0").gauge("rbln_kv_blocks_used", group=0, kind="paged")
    mask = board.histogram("rbln_grammar_mask_seconds", part="fill")
    rows = decodes[-1].bucket - 1

    def request() -> None:
        server.observe_request(
            route="/v1/completions",
            method="POST",
            code=200,
            outcome="ok",
            stream=True,
            seconds=0.2,
        )

    return {
        A_STEP: _least_s(lambda: steps.record(decodes[-1], rows, rows, 0.001)),
        "a prefill step": _least_s(lambda: steps.record(chunk, 1, 90, 0.004)),
        A_GAUGE: _least_s(lambda: gauge.set(7.0)),
        "a grammar mask (two parts a step)": _least_s(lambda: mask.observe(0.0002)),
        "an HTTP request": _least_s(request),
        "a look at the event loop (4 a second)": _least_s(lambda: server.observe_loop_lag(0.001)),
        "a scrape of /metrics, without vLLM's own": _least_s(server.render),
    }


def _least_s(call: Callable[[], object]) -> float:
    """Return the minimum over repeats, because other load only adds to a call."""
    call()
    timer = timeit.Timer(call)
    number = max(1, int(_LEAST_S / max(timer.timeit(1), 1e-7)))
    return min(timer.repeat(_REPEATS, number)) / number
