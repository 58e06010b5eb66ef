"""The check of stored graphs as the commands of `cache` make it."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend import api
from rbln_backend.store.cache_key import CacheKey


class GraphChecks:
    """Checks graphs one by one and counts those that only another version can check."""

    def __init__(self) -> None:
        self.skipped = 0

    def __call__(self, key: CacheKey, files: Mapping[str, bytes]) -> None:
        """Raise `CorruptArtifactError` for a graph that a start would not load."""
        self.skipped += not api.check_graph(key, files)

    def report(self) -> str:
        """Return a line about the graphs that were not checked, empty where all were."""
        if not self.skipped:
            return ""
        return (
            f"{self.skipped} graphs of other versions: only sizes and digests were checked, this "
            "version does not load them\n"
        )
