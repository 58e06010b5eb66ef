"""Stand-in of the SDK's profiler that only logs its calls."""

from __future__ import annotations

from rebel import log


def start() -> None:
    """Begin a trace."""
    log.write("profiler", action="start")


def done() -> None:
    """End the trace."""
    log.write("profiler", action="done")
