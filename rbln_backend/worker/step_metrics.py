"""Counts every step on the metrics board; all label sets exist before the first step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rbln_backend.compiler.port import GraphSpec
from rbln_backend.metric_cells import CounterHandle, HistogramHandle
from rbln_backend.stats import MetricsBoard
from rbln_backend.worker.usage_recorder import UsageRecorder


@dataclass(frozen=True)
class _Series:
    batch_size: int
    steps: CounterHandle
    seconds: HistogramHandle
    useful_rows: CounterHandle
    padded_rows: CounterHandle
    useful_tokens: CounterHandle | None
    padded_tokens: CounterHandle | None


class StepMetrics:
    """Bucket use and padding, per phase and bucket; exact sizes go to the ``usage`` record.

    Made when the engine is ready: from then on the latest step has a time, so that an engine that
    never makes its first is seen.
    """

    def __init__(
        self,
        board: MetricsBoard,
        specs: list[GraphSpec],
        usage: UsageRecorder | None = None,
        *,
        engine: int = 0,
    ) -> None:
        self._board = board
        self._usage = usage
        self._last_step = board.gauge("rbln_engine_last_step_timestamp_seconds", engine=engine)
        self._last_step.set(time.time())
        self._series = {spec: self._declare(spec) for spec in specs}

    def _declare(self, spec: GraphSpec) -> _Series:
        labels = {"phase": spec.phase_name, "bucket": str(spec.bucket)}
        is_prefill = spec.phase.takes_chunk
        chunk = {"chunk": str(spec.bucket)}
        return _Series(
            batch_size=spec.batch_size,
            steps=self._board.counter("rbln_bucket_steps_total", **labels),
            seconds=self._board.histogram("rbln_bucket_step_seconds", **labels),
            useful_rows=self._board.counter("rbln_bucket_useful_rows_total", **labels),
            padded_rows=self._board.counter("rbln_bucket_padded_rows_total", **labels),
            useful_tokens=self._board.counter("rbln_prefill_useful_tokens_total", **chunk)
            if is_prefill
            else None,
            padded_tokens=self._board.counter("rbln_prefill_padded_tokens_total", **chunk)
            if is_prefill
            else None,
        )

    def record(self, spec: GraphSpec, num_reqs: int, num_tokens: int, seconds: float) -> None:
        """One step of ``spec`` with ``num_reqs`` real rows and ``num_tokens`` real tokens."""
        series = self._series.get(spec)
        if series is None:
            series = self._series[spec] = self._declare(spec)
        series.steps.inc()
        series.seconds.observe(seconds)
        series.useful_rows.inc(num_reqs)
        if num_reqs < series.batch_size:
            series.padded_rows.inc(series.batch_size - num_reqs)
        if series.useful_tokens is not None and series.padded_tokens is not None:
            series.useful_tokens.inc(num_tokens)
            series.padded_tokens.inc(spec.bucket - num_tokens)
        self._last_step.set(time.time())
        if self._usage is not None:
            size = num_tokens if spec.phase.takes_chunk else num_reqs
            self._usage.note(spec.phase_name, size, spec.bucket, seconds)
