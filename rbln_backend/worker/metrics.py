"""What a rank counts: steps and their sizes, the store, the phases of its start."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.logger import init_logger

from rbln_backend.buckets import BucketTable, get_padded_size
from rbln_backend.config import RblnConfig
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.devices.port import Compiler
from rbln_backend.graphs.cache import ArtifactStore, CacheKey, StoreEvent, graph_store
from rbln_backend.reports.metrics import BatchSizeLog, CounterHandle, MetricsBoard, StepCells
from rbln_backend.settings import configured
from rbln_backend.usage import Usage, UsageFile, about_engine
from rbln_backend.worker.graph_factory import cache_fields
from rbln_backend.worker.inputs import KvGroup

logger = init_logger(__name__)


@dataclass(frozen=True)
class _Series:
    takes_chunk: bool
    tuned_as: str
    """Name of the phase whose buckets are tuned with it."""
    bucket: int
    batch_size: int
    cells: StepCells
    tokens: tuple[CounterHandle, CounterHandle] | None
    """Useful and padded ones of a chunk."""


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
            tokens=None
            if not is_prefill
            else (
                self._board.counter("rbln_prefill_useful_tokens_total", **chunk),
                self._board.counter("rbln_prefill_padded_tokens_total", **chunk),
            ),
        )

    def record(self, spec: GraphSpec, num_reqs: int, num_tokens: int, seconds: float) -> None:
        """Record a step of ``spec`` with ``num_reqs`` real rows and ``num_tokens`` real tokens.

        Both are 0 where a data-parallel rank runs padding in another rank's step.
        """
        latest = self._latest
        if latest is not None and latest[0] is spec:
            series = latest[1]
        else:
            if spec not in self._series:
                self._series[spec] = self._declare(spec)
            series = self._series[spec]
            self._latest = (spec, series)
        # A chunk may have several requests, but a chunk of one has no padded row.
        series.cells.add(num_reqs, max(0, series.batch_size - num_reqs), seconds)
        if series.tokens is not None:
            useful, padded = series.tokens
            useful.inc(num_tokens)
            padded.inc(series.bucket - num_tokens)
        self._last_step.set_to_now()
        if num_reqs:
            size = get_padded_size(num_tokens, num_reqs) if series.takes_chunk else num_reqs
            if self._usage is not None:
                self._usage.note(series.tuned_as, size, series.bucket, seconds)
            if self._sizes is not None:
                self._sizes.note(series.tuned_as, size, seconds)


# Counts of step sizes, written to a file for the bucket tuner.


Fingerprint = Mapping[str, str | int | bool | None]

_PERIOD_S = 60.0


def open_recorder(
    root: Path,
    model: ModelConfig,
    configuration: Mapping[str, Any],
    device: Fingerprint,
    tables: Mapping[Phase, BucketTable],
) -> UsageRecorder:
    """Return a recorder below ``root``, with one file per model, configuration and device.

    ``configuration`` is the part of the cache key that all graphs share. So step times of another
    dtype, with adapters or of other kernels go to another file; buckets are not part of it.
    """
    key = CacheKey({**configuration, "served": model.model, "device": dict(device)})
    adapters = ", adapters" if configuration.get("lora") else ""
    about = about_engine(
        model.model,
        f"{device.get('device', '')} {model.dtype}{adapters}".strip(),
        decode_buckets=tables[Phase.DECODE].sizes,
        prefill_buckets=tables[Phase.PREFILL].sizes,
    )
    return UsageRecorder(UsageFile(root / f"{key.digest}.json"), about)


class UsageRecorder:
    """Counts steps in memory; a thread writes the counts once a minute and at the end.

    A killed process loses the counts since the last write.
    """

    def __init__(
        self, file: UsageFile, about: dict[str, Any] | None = None, period_s: float = _PERIOD_S
    ) -> None:
        self._file = file
        self._about = about or {}
        self._period_s = period_s
        self._counted = Usage()
        self._since = time.monotonic()
        self._handed: queue.SimpleQueue[Usage | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True, name="usage-record")
        self._writer.start()

    @property
    def path(self) -> Path:
        return self._file.path

    def note(self, phase: str, size: int, bucket: int, seconds: float) -> None:
        """Count one step of ``size`` rows or tokens that ran in ``bucket``."""
        self._counted.phases[phase].note(size, bucket, seconds)
        now = time.monotonic()
        if now - self._since >= self._period_s:
            self._since = now
            self._hand_over()

    def close(self) -> None:
        self._hand_over()
        self._handed.put(None)
        self._writer.join(timeout=5.0)

    def _hand_over(self) -> None:
        counted, self._counted = self._counted, Usage()
        counted.about = self._about
        self._handed.put(counted)

    def _write(self) -> None:
        while (counted := self._handed.get()) is not None:
            if not counted.steps:
                continue
            try:
                self._file.add(counted)
            except OSError as error:
                # A full or read-only disk must not affect the service.
                logger.warning_once("bucket use is not recorded: %s", error)


def open_usage(
    config: VllmConfig,
    compiler: Compiler,
    groups: Sequence[KvGroup],
    tables: Mapping[Phase, BucketTable],
) -> UsageRecorder | None:
    """Return the recorder of the engine's file, None where nothing is to be written."""
    rbln = configured(config)
    if rbln.cache_read_only:
        return None
    root = Path(rbln.cache_root) / "rbln" / "usage"
    threads = rbln.num_threads or len(os.sched_getaffinity(0))
    device = {**compiler.fingerprint(), "device": compiler.hardware, "threads": threads}
    fields = cache_fields(config, rbln, groups)
    return open_recorder(root, config.model_config, fields, device, tables)


def open_store(rbln: RblnConfig, board: MetricsBoard) -> ArtifactStore | None:
    """Return the store of compiled graphs, None if the cache is disabled.

    Its events are metrics, whose label sets exist from the start, at 0.
    """
    requests = {
        kind: board.counter("rbln_compile_cache_requests_total", result=kind)
        for kind in ("hit", "miss", "corrupt")
    }
    writes = {
        kind: board.counter("rbln_compile_cache_writes_total", result=kind)
        for kind in ("stored", "failed", "read_only")
    }
    lock_wait = board.histogram("rbln_compile_cache_lock_wait_seconds")

    def record(event: StoreEvent) -> None:
        if event.kind in requests:
            requests[event.kind].inc()
        elif event.kind in writes:
            writes[event.kind].inc()
        elif event.kind == "lock_wait":
            lock_wait.observe(event.seconds)

    if rbln.disable_compile_cache:
        board.counter("rbln_compile_cache_requests_total", result="bypass").inc()
        return None
    return ArtifactStore(
        graph_store(Path(rbln.cache_root)),
        max_bytes=rbln.cache_max_bytes,
        read_only=rbln.cache_read_only,
        bundles=[graph_store(Path(bundle)) for bundle in rbln.cache_bundles],
        on_event=record,
    )


PHASE_SECONDS = "rbln_startup_phase_seconds"
"""The gauge, labelled `phase`."""


@contextmanager
def timed_phase(board: MetricsBoard, phase: str) -> Iterator[None]:
    """Set ``PHASE_SECONDS`` to the seconds of the block, also when it fails."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - started
        board.gauge(PHASE_SECONDS, phase=phase).set(seconds)
