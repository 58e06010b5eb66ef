"""VLLM_LOG_BATCHSIZE_INTERVAL: how often steps of each size ran, as a line of the log.

The line begins as vLLM's own does; the sizes of prefill chunks follow those of decode batches,
since a chunk may be as small as a batch. `server.tuning.batchsize_log` reads it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict, deque

logger = logging.getLogger(__name__)

_LATEST = 1000


class _Size:
    """Steps of one size; the median is that of the latest."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds: deque[float] = deque(maxlen=_LATEST)


class BatchSizeLog:
    """Used from the step loop; every line tells all steps since the process began."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._sizes: dict[tuple[str, int], _Size] = defaultdict(_Size)
        self._told_at = time.monotonic()
        self._news = False

    def note(self, phase: str, size: int, seconds: float) -> None:
        """Count a step of `size` requests (decode) or tokens (prefill)."""
        found = self._sizes[phase, size]
        found.steps += 1
        found.seconds.append(seconds)
        self._news = True
        if time.monotonic() - self._told_at >= self._interval_s:
            self.tell()

    def tell(self) -> None:
        """Write a line, unless there is nothing new."""
        if not self._news:
            return
        self._news, self._told_at = False, time.monotonic()
        logger.info(
            "Batchsize forward time stats (batchsize, count, median_time(ms)): "
            "%s decode, %s prefill",
            self._stats("decode"),
            self._stats("prefill"),
        )

    def _stats(self, phase: str) -> list[tuple[int, int, float]]:
        """The most frequent first."""
        found = [
            (size, one.steps, round(statistics.median(one.seconds) * 1000.0, 2))
            for (of, size), one in self._sizes.items()
            if of == phase
        ]
        return sorted(found, key=lambda stats: -stats[1])
