"""Seconds that the last start below a cache root took, as the forecast of the next one."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rbln_backend.host.replaced_files import replace_file

logger = logging.getLogger(__name__)

_LONGEST_S = 1e7


class LastStart:
    """The file `<cache_root>/rbln/last_start.json`, which holds one number.

    An unreadable or unwritable file is ignored.
    """

    def __init__(self, cache_root: Path) -> None:
        self._path = cache_root / "rbln" / "last_start.json"

    def seconds(self) -> float | None:
        """Return the seconds from process start to `ready`, None if they are unknown."""
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError):
            return None
        return content if isinstance(content, float) and 0 <= content < _LONGEST_S else None

    def keep(self, seconds: float) -> None:
        """Store the seconds of this start."""
        try:
            replace_file(self._path, json.dumps(round(seconds, 3)).encode())
        except OSError as error:
            logger.debug("The duration of this start is not stored: %s", error)
