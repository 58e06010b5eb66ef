"""What a start will take, from what starts on this host took: the ETA before anything is measured.

`<cache_root>/rbln/start_costs.json` maps keys to seconds: `kernels` of the latest build, and per
configuration the phases of its latest start. A configuration that is there has its graphs in the
store, most likely; whether it does is learnt when they are looked up, and the ETA with it. Nothing
depends on the file: one that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from rbln_backend.host.cores import core_budget
from rbln_backend.host.replaced_files import replace_file

logger = logging.getLogger(__name__)

# Measured on an Ice Lake Xeon with two cores; a guess elsewhere, until the first start is over.
_KERNEL_CORE_S = 60.0
_GRAPH_S, _LAYER_S = 0.2, 0.06
_READ_BYTES_PER_S = 500e6
_STORED_GRAPH_S = 0.03
_WARMUP_S = 0.5

_MOST_KEYS = 200


class StartCosts:
    """The seconds of a start of one configuration."""

    def __init__(self, cache_root: Path, configuration: object) -> None:
        """``configuration``: what names it; its ``repr`` must be the same in every process."""
        self._path = cache_root / "rbln" / "start_costs.json"
        self._key = hashlib.sha256(repr(configuration).encode()).hexdigest()[:16]

    def kernels_s(self) -> float:
        """Seconds that building the kernels takes."""
        known = self._read().get("kernels")
        if isinstance(known, float):
            return known
        return _KERNEL_CORE_S / core_budget().threads(0, 1)

    def phases_s(self, weight_bytes: int, graphs: int, layers: int) -> dict[str, float]:
        """Seconds of the phases `load`, `compile` and `warmup`."""
        known = self._read().get(self._key)
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
        """Remember what the phases `load` and `warmup` of this start took."""
        self._write({self._key: {name: round(s, 3) for name, s in phases_s.items()}})

    def keep_kernels(self, seconds: float) -> None:
        """Remember what building the kernels took."""
        self._write({"kernels": round(seconds, 3)})

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self, news: Mapping[str, object]) -> None:
        older = {name: value for name, value in self._read().items() if name not in news}
        latest = dict([*older.items(), *news.items()][-_MOST_KEYS:])
        try:
            replace_file(self._path, json.dumps(latest).encode())
        except OSError as error:
            logger.debug("What this start took is not kept: %s", error)
