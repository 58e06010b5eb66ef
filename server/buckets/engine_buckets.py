"""`EngineBucketCalls`: the engine's calls that report and change its compiled sizes."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from rbln_backend.bucketing.usage import PHASES, PhaseUsage, Usage
from server.errors import EngineFailedError


class CallWorkers(Protocol):
    """Calls a method of every worker by name, between two steps."""

    def __call__(self, method: str, *, args: tuple[Any, ...]) -> Awaitable[Any]:
        """Return the results, a list with one item per worker."""
        ...


Tables = Mapping[str, list[int]]
"""Sizes by phase: `decode` in requests, `prefill` in tokens."""


class BucketPort(Protocol):
    """The compiled sizes of a running engine. Every call raises `EngineFailedError`."""

    async def state(self) -> dict[str, Any]:
        """Return the present sizes, and `refusal`: why they cannot change, or None."""
        ...

    async def start(self, tables: Tables) -> dict[str, Any]:
        """Begin a change and return its report."""
        ...

    async def advance(self) -> dict[str, Any]:
        """Do one piece of work of the change and return its report."""
        ...

    async def release(self) -> int:
        """Free the graphs of earlier sizes; return how many."""
        ...

    async def usage(self) -> Usage | None:
        """Return the counts of steps since the engine's start; None if none are recorded."""
        ...


class EngineBucketCalls:
    """`BucketPort` over the worker's methods of the same names."""

    def __init__(self, call: CallWorkers) -> None:
        self._call_workers = call

    async def state(self) -> dict[str, Any]:
        """Return the present sizes; see `BucketPort`."""
        return dict(await self._call("bucket_state"))

    async def start(self, tables: Tables) -> dict[str, Any]:
        """Begin a change; see `BucketPort`."""
        sizes = list(tables["decode"]), list(tables["prefill"])
        return dict(await self._call("start_bucket_change", *sizes))

    async def advance(self) -> dict[str, Any]:
        """Do one piece of work; see `BucketPort`."""
        return dict(await self._call("advance_bucket_change"))

    async def release(self) -> int:
        """Free the graphs of earlier sizes; see `BucketPort`."""
        return int(await self._call("release_graphs"))

    async def usage(self) -> Usage | None:
        """Return the counts of steps; see `BucketPort`."""
        counts = await self._call("bucket_usage")
        if counts is None:
            return None
        return Usage({phase: _phase_usage(counts[phase]) for phase in PHASES})

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return (await self._call_workers(method, args=arguments))[0]
        except Exception as error:
            # The boundary to the engine, which raises exceptions of its own.
            raise EngineFailedError(f"The engine did not answer {method}: {error}") from error


def _phase_usage(counts: Mapping[str, list[list[float]]]) -> PhaseUsage:
    return PhaseUsage(
        {int(size): int(steps) for size, steps in counts["steps_by_size"]},
        {int(bucket): int(steps) for bucket, steps in counts["steps_by_bucket"]},
        {int(bucket): seconds for bucket, seconds in counts["seconds_by_bucket"]},
    )
