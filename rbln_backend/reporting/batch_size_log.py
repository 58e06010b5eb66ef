"""VLLM_LOG_BATCHSIZE_INTERVAL: a periodic log line with counts of steps by size.

The line begins like vLLM's. Sizes of prefill chunks follow those of decode batches, because a chunk
may be as small as a batch. `rbln_backend.usage` reads it.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict, deque
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict

logger = logging.getLogger(__name__)

_LATEST = 1000


class _Size:
    """Steps of one size, with the times of the latest ones."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds: deque[float] = deque(maxlen=_LATEST)


class BatchSizeLog:
    """Counts of all steps since the process began; used from the step loop."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._sizes: dict[tuple[str, int], _Size] = defaultdict(_Size)
        self._logged_at = time.monotonic()
        self._has_news = False

    def note(self, phase: str, size: int, seconds: float) -> None:
        """Count a step of `size` requests (decode) or tokens (prefill)."""
        found = self._sizes[phase, size]
        found.steps += 1
        found.seconds.append(seconds)
        self._has_news = True
        if time.monotonic() - self._logged_at >= self._interval_s:
            self.log()

    def log(self) -> None:
        """Write a line if steps ran since the previous one."""
        if not self._has_news:
            return
        self._has_news, self._logged_at = False, time.monotonic()
        logger.info(
            "Batchsize forward time stats (batchsize, count, median_time(ms)): "
            "%s decode, %s prefill",
            self._stats("decode"),
            self._stats("prefill"),
        )

    def _stats(self, phase: str) -> list[tuple[int, int, float]]:
        """Return size, count and median milliseconds, most frequent first."""
        found = [
            (size, one.steps, round(statistics.median(one.seconds) * 1000.0, 2))
            for (of, size), one in self._sizes.items()
            if of == phase
        ]
        return sorted(found, key=lambda stats: -stats[1])


_KEY = '["rbln_bucket_useful_rows"'
"""Prefix of this counter's keys. It does not count steps that are only padding."""


def computed_rows(run_dir: Path, engines: int) -> float | None:
    """Return the rows of requests in all steps so far.

    None if fewer than ``engines`` engines have files on this host: the others may compute.
    """
    boards: list[float] = []
    for path in (run_dir / "metrics").glob("counter_*.db"):
        values = MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
        if rows := [value for key, value, *_ in values if key.startswith(_KEY)]:
            boards.append(sum(rows))
    return sum(boards) if len(boards) >= engines else None
