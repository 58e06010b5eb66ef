"""Expected duration of a start, from earlier starts on this host.

`<cache_root>/rbln/start_costs.json` maps keys to seconds: `kernels` for the latest build, per
configuration the phases of its latest start, and per command line the time to `ready`, which is all
that is known before the engine process runs. The graphs of a known configuration are assumed to be
stored; the estimate is corrected when they are looked up. An unreadable or unwritable file is
ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rbln_backend.host.cores import core_budget
from rbln_backend.host.replaced_files import replace_file

logger = logging.getLogger(__name__)

# Measured on an Ice Lake Xeon with two cores; used until the first start is complete.
_KERNEL_CORE_S = 60.0
_GRAPH_S, _LAYER_S = 0.2, 0.06
_READ_BYTES_PER_S = 500e6
_STORED_GRAPH_S = 0.03
_WARMUP_S = 0.5
_FIRST_START_S = 20.0

_MOST_KEYS = 200
_LONGEST_S = 1e7
_PHASES = {"load", "warmup"}


class _CostFile:
    """The file, shared by all processes of this user."""

    def __init__(self, cache_root: Path) -> None:
        self._path = cache_root / "rbln" / "start_costs.json"

    def read(self) -> dict[str, object]:
        """Return the valid entries: seconds, and seconds by phase."""
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(content, dict):
            return {}
        return {name: value for name, value in content.items() if _is_cost(value)}

    def write(self, news: Mapping[str, object]) -> None:
        """Add entries; the oldest are dropped above the limit."""
        older = {name: value for name, value in self.read().items() if name not in news}
        latest = dict([*older.items(), *news.items()][-_MOST_KEYS:])
        try:
            replace_file(self._path, json.dumps(latest).encode())
        except OSError as error:
            logger.debug("The duration of this start is not stored: %s", error)


def _is_cost(value: object) -> bool:
    if isinstance(value, dict):
        return value.keys() == _PHASES and all(_is_seconds(part) for part in value.values())
    return _is_seconds(value)


def _is_seconds(value: object) -> bool:
    return isinstance(value, float) and 0 <= value < _LONGEST_S


class ReadyTimes:
    """Seconds from a command line to `ready`."""

    def __init__(self, cache_root: Path, argv: Sequence[str]) -> None:
        self._file = _CostFile(cache_root)
        self._key = "ready-" + _digest(list(argv))

    def expected_s(self) -> float:
        """Return the seconds of the latest start with this command line, else of any, else 20."""
        known = self._file.read()
        others = [seconds for name, seconds in known.items() if name.startswith("ready-")]
        like = (known.get(self._key), *reversed(others))
        return next((s for s in like if isinstance(s, float)), _FIRST_START_S)

    def keep(self, seconds: float) -> None:
        """Store the seconds of this start."""
        self._file.write({self._key: round(seconds, 3)})


class StartCosts:
    """Seconds of the starts of one configuration."""

    def __init__(self, cache_root: Path, configuration: object) -> None:
        """The ``repr`` of ``configuration`` identifies it, and must be equal in all processes."""
        self._file = _CostFile(cache_root)
        self._key = _digest(configuration)

    def kernels_s(self) -> float:
        """Return the expected seconds of a kernel build."""
        known = self._file.read().get("kernels")
        if isinstance(known, float):
            return known
        return _KERNEL_CORE_S / core_budget().threads(0, 1)

    def phases_s(self, weight_bytes: int, graphs: int, layers: int) -> dict[str, float]:
        """Return the expected seconds of the phases `load`, `compile` and `warmup`."""
        known = self._file.read().get(self._key)
        if isinstance(known, dict):
            return {
                "load": float(known["load"]),
                "compile": graphs * _STORED_GRAPH_S,
                "warmup": float(known["warmup"]),
            }
        return {
            "load": 1.0 + weight_bytes / _READ_BYTES_PER_S,
            "compile": graphs * (_GRAPH_S + layers * _LAYER_S),
            "warmup": _WARMUP_S,
        }

    def keep(self, phases_s: Mapping[str, float]) -> None:
        """Store the seconds of the phases `load` and `warmup` of this start."""
        self._file.write({self._key: {name: round(s, 3) for name, s in phases_s.items()}})

    def keep_kernels(self, seconds: float) -> None:
        """Store the seconds of a kernel build."""
        self._file.write({"kernels": round(seconds, 3)})


def _digest(names: object) -> str:
    return hashlib.sha256(repr(names).encode()).hexdigest()[:16]
