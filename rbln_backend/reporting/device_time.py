"""Device seconds of all engines by account, read from the metric files of a run directory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from prometheus_client.mmap_dict import MmapedDict

_KEY = '["rbln_device_seconds"'
"""Prefix of this counter's keys."""


class DeviceAccount(NamedTuple):
    """Labels of ``rbln_device_seconds_total``."""

    kind: str
    key: str
    model: str


class DeviceTime(NamedTuple):
    """Seconds since the engines' start by account, and the number of engines that report any."""

    seconds: dict[DeviceAccount, float]
    engines: int


def read_device_time(run_dir: Path) -> DeviceTime:
    """Return the device time so far of the engines on this host."""
    total: Counter[DeviceAccount] = Counter()
    engines = 0
    for path in (run_dir / "metrics").glob("counter_*.db"):
        values = MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
        found = [(json.loads(key)[2], value) for key, value, *_ in values if key.startswith(_KEY)]
        engines += bool(found)
        for labels, seconds in found:
            total[DeviceAccount(**labels)] += seconds
    return DeviceTime(dict(total), engines)
