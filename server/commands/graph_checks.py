"""Checks of stored graphs for the `cache` commands."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend import api
from rbln_backend.api.store import CacheKey


class GraphChecks:
    """Checks graphs and counts those of other versions, which cannot be checked here."""

    def __init__(self) -> None:
        self.skipped = 0

    def __call__(self, key: CacheKey, files: Mapping[str, bytes]) -> None:
        """Raise `CorruptArtifactError` for a graph that a start would not load."""
        self.skipped += not api.check_graph(key, files)

    def report(self) -> str:
        """Return a line about unchecked graphs, empty if all were checked."""
        if not self.skipped:
            return ""
        return (
            f"{self.skipped} graphs of other versions: only sizes and digests were checked, this "
            "version does not load them\n"
        )
