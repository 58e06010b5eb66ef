"""`BucketChanges`: one change of the compiled sizes at a time, its progress and its effect."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rbln_backend.bucketing.usage import Usage
from server.buckets.effect import Effect, effect_of, since
from server.buckets.engine_buckets import BucketPort, Tables
from server.buckets.status import BucketStatus, ChangeProgress, ChangeResult
from server.errors import (
    BucketChangeRunningError,
    EngineFailedError,
    ServerError,
    UnsupportedOperationError,
)

logger = logging.getLogger(__name__)

Reason = Literal["request", "auto", "revert"]
Shares = Mapping[str, float]
RESULTS = ("done", "failed")
_PERIOD_S = {"compile": 0.05}
"""Seconds between two calls of the engine while its child compiles."""
_BETWEEN_S = 0.01
"""Seconds between two pieces of work: at least one step of most models."""


@dataclass
class _Change:
    """A change, from its request on."""

    tables: Tables
    old: Tables
    reason: Reason
    predicted: Shares | None
    report: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    phase: str = ""
    phase_began: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    released: int | None = None
    before: Usage | None = None
    """Steps in the old sizes."""
    swapped: Usage | None = None
    """Steps up to the swap."""


class BucketMetrics(Protocol):
    """Metrics of changes."""

    def observe_bucket_change(self, reason: str, result: str) -> None:
        """Publish that a change is `running`, or count one that is `done` or `failed`."""
        ...

    def observe_bucket_effect(self, savings: Shares) -> None:
        """Publish the share of step time that the last change saved, by phase."""
        ...


class BucketChanges:
    """Runs changes in the background. Used from the event loop only."""

    def __init__(
        self,
        port: Callable[[], BucketPort | None],
        metrics: BucketMetrics,
        grace_s: float,
        take_decode: Callable[[tuple[int, ...]], None],
    ) -> None:
        """Graphs of earlier sizes stay for `grace_s` seconds after a change.

        `take_decode` is called with the decode buckets after each change.
        """
        self._take_decode = take_decode
        self._find_port, self._metrics, self._grace_s = port, metrics, grace_s
        self._running: _Change | None = None
        self._last: _Change | None = None
        self._task: asyncio.Task[None] | None = None
        self._release: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """True while a change is not complete."""
        return self._running is not None

    @property
    def last(self) -> tuple[Tables, Reason] | None:
        """The sizes before the last change and its reason; None before the first that succeeded."""
        last = self._last
        is_done = last is not None and last.report.get("phase") == "done"
        return (last.old, last.reason) if last is not None and is_done else None

    async def state(self) -> dict[str, Any]:
        """Return the engine's report; raises `UnsupportedOperationError` before the start."""
        return await self._port().state()

    async def begin(self, tables: Tables, reason: Reason, predicted: Shares | None = None) -> None:
        """Start a change to `tables`, which fit the engine's limits.

        `predicted` is the share of step time that it should save, by phase. Raises
        `UnsupportedOperationError` where the engine cannot change its sizes, and
        `BucketChangeRunningError`.
        """
        state = await self.state()
        if state["refusal"] is not None:
            raise UnsupportedOperationError(
                f"The buckets of this engine cannot change while it serves: {state['refusal']}. "
                "Start the server with the sizes."
            )
        if self._running is not None:
            raise BucketChangeRunningError(
                "A change of the buckets is not complete; GET /admin/buckets has its progress."
            )
        old = {phase: list(state[phase]) for phase in ("decode", "prefill")}
        if predicted is not None:
            predicted = {p: share for p, share in predicted.items() if tables[p] != old[p]}
        self._running = _Change(tables, old, reason, predicted)
        self._metrics.observe_bucket_change(reason, "running")
        self._task = asyncio.ensure_future(self._run(self._running))

    async def wait(self) -> None:
        """Return when no change runs."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def close(self) -> None:
        """Stop driving changes; the engine frees its own at its end."""
        for task in (self._task, self._release):
            if task is not None:
                task.cancel()

    async def effect(self) -> tuple[Effect, Usage] | None:
        """Return the effect of the last change and the steps since; None without counts."""
        last, total = self._last, await self._port().usage()
        if last is None or last.before is None or last.swapped is None or total is None:
            return None
        after = since(total, last.swapped)
        effect = effect_of(last.before, last.old, last.tables, after)
        self._metrics.observe_bucket_effect({p: e["saving"] for p, e in effect.items() if e})
        return effect, after

    async def status(self) -> BucketStatus:
        """Return the present sizes, the change in progress and the last one."""
        measured = self._last
        effect = await self.effect()
        # Sizes and change are of one moment: no change ends between an answer of the engine and
        # the lines that follow it.
        state = await self.state()
        running, last = self._running, self._last
        if last is not measured:
            effect = None
        return BucketStatus(
            status="changing" if running is not None else "idle",
            decode=state["decode"],
            prefill=state["prefill"],
            refusal=state["refusal"],
            change=None if running is None else _progress(running),
            last=None if last is None else _result(last, effect[0] if effect else None),
        )

    def _port(self) -> BucketPort:
        port = self._find_port()
        if port is None:
            raise UnsupportedOperationError(
                "The engine has not started, or serves another API; its sizes are not known."
            )
        return port

    async def _run(self, change: _Change) -> None:
        logger.info("Buckets change (%s) to %s", change.reason, change.tables)
        try:
            await self._drive(change)
        except ServerError as error:
            change.report |= {"phase": "failed", "error": str(error)}
        self._end(change)

    async def _drive(self, change: _Change) -> None:
        port = self._port()
        if self._release is not None:
            self._release.cancel()
        change.report = await port.start(change.tables)
        while (phase := change.report["phase"]) not in RESULTS:
            if phase != change.phase:
                change.phase, change.phase_began = phase, time.monotonic()
            await asyncio.sleep(_PERIOD_S.get(phase, _BETWEEN_S))
            if phase == "swap":
                await self._note_usage(port, change)
            change.report = await port.advance()

    async def _note_usage(self, port: BucketPort, change: _Change) -> None:
        """Keep the counts up to the swap, which follows at once."""
        change.swapped = total = await port.usage()
        earlier = self._last.swapped if self._last is not None else None
        if total is not None:
            change.before = since(total, earlier) if earlier is not None else total

    def _end(self, change: _Change) -> None:
        change.ended_at, self._running = time.time(), None
        phase = change.report["phase"]
        self._metrics.observe_bucket_change(change.reason, phase)
        if phase == "failed":
            logger.warning("Buckets did not change: %s", change.report["error"])
            # The counts of the present sizes begin at the last swap, not here.
            change.swapped = self._last.swapped if self._last is not None else None
            change.before = None
        else:
            if change.tables["decode"]:
                self._take_decode(tuple(change.tables["decode"]))
            seconds, graphs = change.report["seconds"], change.report["graphs"]
            logger.info("Buckets changed after %.1f s; new graphs: %s", seconds, graphs or "none")
        self._last = change
        self._release = asyncio.ensure_future(self._release_later(change))

    async def _release_later(self, change: _Change) -> None:
        await asyncio.sleep(self._grace_s)
        try:
            change.released = await self._port().release()
        except EngineFailedError:
            return
        logger.info("Buckets: %d unused graphs freed", change.released)


def _progress(change: _Change) -> ChangeProgress:
    report = change.report
    done, total = report.get("done", 0), report.get("total", 0)
    elapsed = time.monotonic() - change.began
    in_phase = time.monotonic() - change.phase_began
    return ChangeProgress(
        phase=report.get("phase", "start"),
        graphs={"done": done, "total": total},
        elapsed_s=round(elapsed, 3),
        eta_s=round(in_phase * (total - done) / done, 3) if done else None,
        decode=list(change.tables["decode"]),
        prefill=list(change.tables["prefill"]),
        reason=change.reason,
    )


def _result(change: _Change, effect: Effect | None) -> ChangeResult:
    report = change.report
    return ChangeResult(
        result=report["phase"],
        error=report.get("error"),
        reason=change.reason,
        old_decode=list(change.old["decode"]),
        old_prefill=list(change.old["prefill"]),
        decode=list(change.tables["decode"]),
        prefill=list(change.tables["prefill"]),
        graphs=dict(report.get("graphs") or {}),
        seconds=round(report.get("seconds", 0.0), 3),
        ended_at=change.ended_at or 0.0,
        released=change.released,
        predicted_saving=None if change.predicted is None else dict(change.predicted),
        effect=effect,
    )
