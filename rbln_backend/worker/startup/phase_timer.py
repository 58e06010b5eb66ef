"""The metric of the start-up phases' seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rbln_backend.reporting.stats import MetricsBoard

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
