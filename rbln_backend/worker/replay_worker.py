"""A rank of a replay: it has the graphs of several sets of buckets, and runs one set at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.compiler.port import Phase
from rbln_backend.worker.worker import RblnWorker


class ReplayWorker(RblnWorker):
    """Adds ``use_buckets`` to the methods that ``collective_rpc`` finds."""

    def use_buckets(self, sizes: Mapping[str, Sequence[int]]) -> None:
        """Run in these alone from now on, by phase; each was compiled, and the largest stay."""
        assert self._build is not None
        self._build.restrict({Phase(name): BucketTable(tuple(s)) for name, s in sizes.items()})
