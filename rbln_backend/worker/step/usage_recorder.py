"""Counts of step sizes, written to a file for the bucket tuner."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.usage import Usage, UsageFile, about_engine
from rbln_backend.core import Phase
from rbln_backend.store.cache_key import CacheKey
from rbln_backend.vllm_compat.surface import ModelConfig, init_logger

logger = init_logger(__name__)

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
        """Path of the file."""
        return self._file.path

    def note(self, phase: str, size: int, bucket: int, seconds: float) -> None:
        """Count one step of ``size`` rows or tokens that ran in ``bucket``."""
        self._counted.phases[phase].note(size, bucket, seconds)
        now = time.monotonic()
        if now - self._since >= self._period_s:
            self._since = now
            self._hand_over()

    def close(self) -> None:
        """Write the remaining counts and end the thread."""
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
