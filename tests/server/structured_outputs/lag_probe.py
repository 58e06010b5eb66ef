"""Probe of the event loop: how long a request that needs nothing else takes, over and over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.real_server import RealServer

_PROBE = """
import http.client, sys, time
host = sys.argv[1]
while True:
    connection = http.client.HTTPConnection(host, timeout=60)
    started = time.perf_counter()
    connection.request("GET", "/livez")
    connection.getresponse().read()
    print(time.perf_counter() - started, flush=True)
    connection.close()
    time.sleep(0.01)
"""


@contextmanager
def lag_of(server: RealServer, tmp_path: Path) -> Iterator[list[float]]:
    """Yield a list that has the seconds of each request when the block ends.

    The probe is another process, because this one is busy.
    """
    seconds: list[float] = []
    output = tmp_path / "probe"
    host = server.url.removeprefix("http://")
    with output.open("wb") as file:
        probe = subprocess.Popen([sys.executable, "-c", _PROBE, host], stdout=file)
    try:
        yield seconds
    finally:
        probe.kill()
        probe.wait(10)
        seconds += [float(line) for line in output.read_text().splitlines()]


def lag_summary(seconds: list[float]) -> str:
    """Return a line for a wide run's output; machines differ too much to assert it."""
    ranked = sorted(seconds)
    return f"lag ms: median {ranked[len(ranked) // 2] * 1000:.1f}, max {ranked[-1] * 1000:.0f}"
