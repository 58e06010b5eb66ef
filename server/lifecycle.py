"""Phases of the service: starting (init, load, compile, warmup), ready, draining, dead.

Every probe, the request gate and the drain read this one object. Invariants: phases only move
forward, except that an admin's drain can be taken back; `started` stays true after the service was
ready once; the requests in flight are those inside `track`.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rbln_backend.api.names import GraphProgress, ProgressSnapshot
from server.errors import DrainingError, EngineFailedError, NotReadyError, ServerError

_DEFAULT_RETRY_S = 5
_MAX_RETRY_S = 120


class ServicePhase(enum.IntEnum):
    """Phases of the service in order, named as in the engine's progress files."""

    INIT = 0
    LOAD = 1
    COMPILE = 2
    WARMUP = 3
    READY = 4
    DRAINING = 5
    DEAD = 6

    @property
    def label(self) -> str:
        """The phase's name in probes and metrics."""
        return self.name.lower()


_Word = Literal["starting", "ready", "draining", "dead"]
_WORDS: Mapping[ServicePhase, _Word] = {
    ServicePhase.READY: "ready",
    ServicePhase.DRAINING: "draining",
    ServicePhase.DEAD: "dead",
}


class GraphCounts(TypedDict):
    """Numbers of ready graphs and of all graphs of the start-up."""

    done: int
    total: int


class ServiceStatus(TypedDict):
    """The body of the probes; times in seconds."""

    status: _Word
    phase: str
    uptime_s: float
    in_flight: int
    reason: str | None
    graphs: GraphCounts
    eta_s: float | None
    detail: str
    ready_after_s: NotRequired[float]


class Lifecycle:
    """State of the service. Used from the event loop only."""

    def __init__(self, started_at: float, expected_s: float | None = None) -> None:
        """`started_at` is the process start on `time.monotonic`'s clock, in seconds.

        `expected_s` is the expected time to ready, until the engine's process reports its own.
        """
        self.phase = ServicePhase.INIT
        self.reason: str | None = None
        self.ready_after_s: float | None = None
        self._tracked: set[asyncio.Task[Any]] = set()
        self._cut: Callable[[], ServerError] | None = None
        self._ending = False
        self._started_at = started_at
        self._expected_s = expected_s
        self._progress: ProgressSnapshot | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return len(self._tracked)

    @property
    def started(self) -> bool:
        """True once the service has been ready."""
        return self.ready_after_s is not None

    @property
    def starting(self) -> bool:
        """True before the service is ready."""
        return self.phase < ServicePhase.READY

    @property
    def uptime_s(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self._started_at

    @property
    def eta_s(self) -> float | None:
        """Seconds until the service is ready, None if unknown or ready."""
        if not self.starting:
            return None
        if self._progress is not None and self._progress.eta_s is not None:
            return self._progress.eta_s
        return None if self._expected_s is None else max(0.0, self._expected_s - self.uptime_s)

    @property
    def graphs(self) -> tuple[int, int]:
        """Numbers of finished graphs and of all graphs of the start-up."""
        progress = self._progress
        return (0, 0) if progress is None else (progress.graphs_done, progress.graphs_total)

    @property
    def graph_progress(self) -> list[GraphProgress]:
        return [] if self._progress is None else self._progress.graphs

    def observe(self, progress: ProgressSnapshot) -> None:
        """Update the phase from the engine's progress; only `mark_ready` reaches `ready`."""
        self._progress = progress
        reported = ServicePhase[progress.phase.upper()]
        if self.starting:
            self.phase = max(self.phase, min(reported, ServicePhase.WARMUP))

    def mark_ready(self) -> None:
        """Enter `ready` unless the service drains or is dead."""
        if self.starting:
            self.phase = ServicePhase.READY
            self.ready_after_s = self.uptime_s

    def begin_drain(self, reason: str) -> None:
        """Stop accepting requests for good; the probes show `reason`."""
        if self.phase <= ServicePhase.DRAINING and not self._ending:
            self.phase, self.reason, self._ending = ServicePhase.DRAINING, reason, True

    def ask_for_drain(self, reason: str) -> None:
        """Stop accepting requests until `take_drain_back`; no-op if the service drains already.

        Raises the `ServerError` of a service that is not ready.
        """
        if self.phase is ServicePhase.DRAINING:
            return
        self.check_ready()
        self.phase, self.reason = ServicePhase.DRAINING, reason

    def take_drain_back(self) -> None:
        """Accept requests again. Raises the `ServerError` of a service that cannot."""
        if self.phase is ServicePhase.DRAINING and not self._ending:
            self.phase, self.reason = ServicePhase.READY, None
        self.check_ready()

    def mark_dead(self, reason: str) -> None:
        """Enter `dead` after the engine failed; the probes show `reason`."""
        if self.phase < ServicePhase.DEAD:
            self.phase, self.reason = ServicePhase.DEAD, reason

    def check_ready(self) -> None:
        """Raise the `ServerError` of a new request unless the service accepts it."""
        if self.phase is ServicePhase.READY:
            return
        if self.phase is ServicePhase.DRAINING:
            what = "shutting down" if self._ending else "being drained"
            raise DrainingError(
                f"The server is {what} ({self.reason}) and takes no new requests.",
                retry_after_s=_DEFAULT_RETRY_S,
            )
        if self.phase is ServicePhase.DEAD:
            raise EngineFailedError(
                f"The engine has failed: {self.reason}", retry_after_s=_DEFAULT_RETRY_S
            )
        raise NotReadyError(
            f"The server is starting: {self._story()}. Ask /readyz for progress.",
            retry_after_s=self.retry_after_s(),
        )

    def retry_after_s(self) -> int:
        if (eta := self.eta_s) is None:
            return _DEFAULT_RETRY_S
        return min(max(1, round(eta)), _MAX_RETRY_S)

    def status(self) -> ServiceStatus:
        progress = self._progress
        done, total = self.graphs
        body: ServiceStatus = {
            "status": _WORDS.get(self.phase, "starting"),
            "phase": self.phase.label,
            "uptime_s": round(self.uptime_s, 3),
            "in_flight": self.in_flight,
            "reason": self.reason,
            "graphs": {"done": done, "total": total},
            "eta_s": self.eta_s,
            "detail": progress.detail if progress is not None else "",
        }
        if self.ready_after_s is not None:
            body["ready_after_s"] = round(self.ready_after_s, 3)
        return body

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one request as in flight, from here to its last byte.

        Raises the `ServerError` of `cut_off`, wherever the block is at that moment.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tracked.add(task)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            # As in `asyncio.timeout`: a cancellation by others is re-raised.
            if self._cut is None or task.uncancel():
                raise
            raise self._cut() from None
        finally:
            self._tracked.discard(task)
            if not self._tracked:
                self._idle.set()

    def cut_off(self) -> None:
        """End every request in flight; only for a service that drains or is dead."""
        dead = self.phase is ServicePhase.DEAD
        why = "The engine has failed: " if dead else "The server is shutting down: "
        self._cut = partial(
            EngineFailedError if dead else DrainingError,
            f"{why}{self.reason}. The answer was cut off.",
            retry_after_s=_DEFAULT_RETRY_S,
        )
        for task in self._tracked:
            task.cancel()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; return False on a timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _story(self) -> str:
        done, total = self.graphs
        graphs = f", {done} of {total} graphs" if total else ""
        eta = "" if self.eta_s is None else f", about {self.eta_s:.0f} s left"
        return f"phase {self.phase.label}{graphs}{eta}"
