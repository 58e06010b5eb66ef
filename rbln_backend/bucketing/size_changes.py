"""`SizeChanges`: replaces an engine's compiled sizes in all its parts, between two steps."""

from __future__ import annotations

from collections.abc import Callable

from rbln_backend.bucketing.engine_buckets import EngineBuckets

TakeSizes = Callable[[EngineBuckets], None]


class SizeChanges:
    """List of the parts of an engine process that choose among compiled sizes.

    It is a field of the configuration, which the scheduler and the worker of one process share.
    A copy, as another process gets it, has no parts.
    """

    def __init__(self) -> None:
        self._takers: list[TakeSizes] = []

    def __reduce__(self) -> tuple[type[SizeChanges], tuple[()]]:
        return SizeChanges, ()

    @property
    def reaches_scheduler(self) -> bool:
        """True if a scheduler of this process takes the sizes."""
        return bool(self._takers)

    def follow(self, take: TakeSizes) -> None:
        """Call `take` with all sizes at each change."""
        self._takers.append(take)

    def announce(self, sizes: EngineBuckets) -> None:
        """Pass `sizes` to all parts; no step runs meanwhile."""
        for take in self._takers:
            take(sizes)
