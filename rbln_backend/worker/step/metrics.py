"""Metrics of every step; all label sets exist before the first step."""

from __future__ import annotations

from dataclasses import dataclass

from rbln_backend.bucketing.chunk_plan import room_of
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.reporting.batch_size_log import BatchSizeLog
from rbln_backend.reporting.metric_cells import CounterHandle, StepCells
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.worker.step.usage_recorder import UsageRecorder


@dataclass(frozen=True)
class _Series:
    takes_chunk: bool
    tuned_as: str
    """Name of the phase whose buckets are tuned with it."""
    bucket: int
    batch_size: int
    cells: StepCells
    useful_tokens: CounterHandle | None
    padded_tokens: CounterHandle | None


class StepMetrics:
    """Bucket use and padding, per phase and bucket; exact sizes go to the ``usage`` record.

    Created when the engine is ready. That time counts as the latest step, so that an engine that
    never completes a step is noticed.
    """

    def __init__(
        self,
        board: MetricsBoard,
        specs: list[GraphSpec],
        usage: UsageRecorder | None = None,
        sizes: BatchSizeLog | None = None,
        *,
        engine: int = 0,
    ) -> None:
        self._board = board
        self._usage = usage
        self._sizes = sizes
        self._last_step = board.gauge("rbln_engine_last_step_timestamp_seconds", engine=engine)
        self._last_step.set_to_now()
        self._series = {spec: self._declare(spec) for spec in specs}
        # Series of the latest step, which the next one mostly shares: the graph has evicted the
        # dictionary from the processor's caches, so that a lookup would read memory.
        self._latest = (specs[0], self._series[specs[0]]) if specs else None

    def _declare(self, spec: GraphSpec) -> _Series:
        labels = {"phase": spec.phase_name, "bucket": spec.size}
        is_prefill = spec.phase.takes_chunk
        chunk = {"chunk": str(spec.bucket)}
        return _Series(
            takes_chunk=is_prefill,
            tuned_as=Phase.DECODE.value if spec.phase is Phase.VERIFY else spec.phase_name,
            bucket=spec.bucket,
            batch_size=spec.batch_size,
            cells=StepCells(
                self._board.counter("rbln_bucket_steps_total", **labels),
                self._board.histogram("rbln_bucket_step_seconds", **labels),
                self._board.counter("rbln_bucket_useful_rows_total", **labels),
                self._board.counter("rbln_bucket_padded_rows_total", **labels),
            ),
            useful_tokens=self._board.counter("rbln_prefill_useful_tokens_total", **chunk)
            if is_prefill
            else None,
            padded_tokens=self._board.counter("rbln_prefill_padded_tokens_total", **chunk)
            if is_prefill
            else None,
        )

    def record(self, spec: GraphSpec, num_reqs: int, num_tokens: int, seconds: float) -> None:
        """Record a step of ``spec`` with ``num_reqs`` real rows and ``num_tokens`` real tokens.

        Both are 0 where a data-parallel rank runs padding in another rank's step.
        """
        series = self._series_of(spec)
        # A chunk may have several requests, but a chunk of one has no padded row.
        series.cells.add(num_reqs, max(0, series.batch_size - num_reqs), seconds)
        if series.useful_tokens is not None and series.padded_tokens is not None:
            series.useful_tokens.inc(num_tokens)
            series.padded_tokens.inc(series.bucket - num_tokens)
        self._last_step.set_to_now()
        if num_reqs:
            size = room_of(num_tokens, num_reqs) if series.takes_chunk else num_reqs
            if self._usage is not None:
                self._usage.note(series.tuned_as, size, series.bucket, seconds)
            if self._sizes is not None:
                self._sizes.note(series.tuned_as, size, seconds)

    def _series_of(self, spec: GraphSpec) -> _Series:
        if self._latest is None or self._latest[0] is not spec:
            if spec not in self._series:
                self._series[spec] = self._declare(spec)
            self._latest = (spec, self._series[spec])
        return self._latest[1]
