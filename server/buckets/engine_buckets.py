"""`EngineBucketCalls`: the engine's calls that report and change its compiled sizes.

They go to all ranks. A change passes its phases on all of them together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from rbln_backend.bucketing.usage import PHASES, PhaseUsage, Usage
from server.errors import EngineFailedError

_PHASES = ("compile", "warmup", "swap", "done")
"""Of a change, in order."""


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
        self._phase = ""
        """The phase of the rank that is behind the others."""

    async def state(self) -> dict[str, Any]:
        """Return the present sizes; see `BucketPort`."""
        states = await self._call("bucket_state")
        refusals = [state["refusal"] for state in states if state["refusal"] is not None]
        return {**states[0], "refusal": refusals[0] if refusals else None}

    async def start(self, tables: Tables) -> dict[str, Any]:
        """Begin a change; see `BucketPort`."""
        sizes = list(tables["decode"]), list(tables["prefill"])
        try:
            return await self._common(await self._call("start_bucket_change", *sizes))
        except EngineFailedError as error:
            # Other ranks may have begun.
            await self._call("stop_bucket_change", str(error))
            raise

    async def advance(self) -> dict[str, Any]:
        """Do one piece of work; see `BucketPort`."""
        return await self._common(await self._call("advance_bucket_change", self._phase))

    async def release(self) -> int:
        """Free the graphs of earlier sizes; see `BucketPort`."""
        return int((await self._call("release_graphs"))[0])

    async def usage(self) -> Usage | None:
        """Return the counts of steps; see `BucketPort`."""
        found = [counts for counts in await self._call("bucket_usage") if counts is not None]
        if not found:
            return None
        (counts,) = found[:1]
        return Usage({phase: _phase_usage(counts[phase]) for phase in PHASES})

    async def _common(self, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the report of the rank that is behind, or of one that failed.

        After a failure the other ranks give up, too.
        """
        failed = [report for report in reports if report["phase"] == "failed"]
        if failed:
            if len(failed) < len(reports):
                await self._call("stop_bucket_change", failed[0]["error"])
            return dict(failed[0])
        behind = min(reports, key=lambda r: (_PHASES.index(r["phase"]), r["done"]))
        self._phase = behind["phase"]
        return dict(behind)

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        try:
            return list(await self._call_workers(method, args=arguments))
        except Exception as error:
            # The boundary to the engine, which raises exceptions of its own.
            raise EngineFailedError(f"The engine did not answer {method}: {error}") from error


def _phase_usage(counts: Mapping[str, list[list[float]]]) -> PhaseUsage:
    return PhaseUsage(
        {int(size): int(steps) for size, steps in counts["steps_by_size"]},
        {int(bucket): int(steps) for bucket, steps in counts["steps_by_bucket"]},
        {int(bucket): seconds for bucket, seconds in counts["seconds_by_bucket"]},
    )
