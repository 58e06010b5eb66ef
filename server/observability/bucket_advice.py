"""The bucket tuner's advice on recorded steps, for `/v1/server_info` and `/metrics`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rbln_backend.api.reports import read_descriptions
from rbln_backend.bucketing.search import advise
from rbln_backend.bucketing.usage import UsageFile
from server.host.tasks import in_thread

_PERIOD_S = 60.0
"""The period at which the engine writes its record."""
_FIRST_PERIOD_S = 5.0


class BucketAdvice:
    """The advice on the usage record of the engine in `run_dir`.

    Computed in a thread: the record is in the cache root, a mount that may hang.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._changed_at: int | None = None
        self._advice: dict[str, Any] | None = None

    async def latest(self) -> dict[str, Any] | None:
        """Return the advice, at most a minute old; None while there is none."""
        period_s = _FIRST_PERIOD_S if self._advice is None else _PERIOD_S
        if (now := self._clock()) - self._looked_at < period_s:
            return self._advice
        self._looked_at = now
        return await in_thread(self._look)

    async def of(self, buckets: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the current advice; `buckets` is the `buckets` section of the engine's report."""
        return await in_thread(partial(self._read, buckets))

    def _look(self) -> dict[str, Any] | None:
        ranks = read_descriptions(self._run_dir)
        return self._read(ranks[0].get("buckets") if ranks else None)

    def _read(self, buckets: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if buckets is None or buckets["usage_file"] is None:
            return None
        path = Path(buckets["usage_file"])
        with self._lock:
            try:
                changed_at = path.stat().st_mtime_ns
                if changed_at != self._changed_at:
                    usage = UsageFile(path).read()
                    self._advice = advise(usage) if usage.steps else None
                    self._changed_at = changed_at
            except (OSError, ValueError):
                # The next step that is written moves a damaged file away.
                return None
            return self._advice
