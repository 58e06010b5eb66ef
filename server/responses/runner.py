"""Makes responses that nobody waits for: each is a request that the service asks itself.

Invariants: one is made at most once at a time; whatever ends this process, one that is open is
made again at the next start, or failed there with the reason (`server.responses.table.unfinished`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from pydantic_core import from_json, to_json
from starlette.types import ASGIApp

from server.admission import Admission
from server.batches.inside import InsideAnswer, ask
from server.frontend import Endpoint, JsonObject, data_of, named_frame
from server.host.tasks import while_running
from server.lifecycle import Lifecycle, Phase
from server.request.record import Insider
from server.responses import table
from server.responses.events import EventLog
from server.responses.response import Response
from server.storage.database import Database
from server.tiers.tier import Tier

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_FLUSH_S = 0.25
_PAUSE_S = 0.5
_OK = 200
_COMES_BACK = (429, 503)
"""Not now: it is asked again."""
_EVENT = "event: response."


@dataclass(eq=False, slots=True)
class _Run:
    response: Response
    log: EventLog = field(default_factory=EventLog)
    task: asyncio.Task[None] | None = None


class Runner:
    """Used from the event loop. At most as many run as the largest bucket has rows."""

    def __init__(self, database: Database, lifecycle: Lifecycle, admission: Admission) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._admission = admission
        self._runs: dict[str, _Run] = {}
        self._waiting: deque[_Run] = deque()
        self._wake = asyncio.Event()

    def add(self, response: Response) -> EventLog:
        """Make a response that is kept already when its turn comes; returns its events."""
        run = _Run(response)
        self._runs[response.id] = run
        self._waiting.append(run)
        self._wake.set()
        return run.log

    def log_of(self, response_id: str) -> EventLog | None:
        """Return the events of one that waits or is being made."""
        run = self._runs.get(response_id)
        return None if run is None else run.log

    async def run(self, app: ASGIApp) -> None:
        """Work until cancelled."""
        for response in await self._database.run(table.unfinished):
            self.add(response)
        try:
            while True:
                self._wake.clear()
                self._start(app)
                try:
                    await asyncio.wait_for(self._wake.wait(), _TICK_S if self._waiting else None)
                except TimeoutError:
                    continue
        finally:
            for run in self._runs.values():
                if run.task is not None:
                    run.task.cancel()

    async def stop(self, response_id: str) -> None:
        """Make it no more; its request in the engine is aborted."""
        run = self._runs.pop(response_id, None)
        if run is None:
            return
        if run.task is None:
            self._waiting.remove(run)
        else:
            run.task.cancel()
            await asyncio.wait({run.task})
        run.log.end()

    def _start(self, app: ASGIApp) -> None:
        rows = self._admission.rows[-1] if self._lifecycle.phase is Phase.READY else 0
        while self._waiting and len(self._runs) - len(self._waiting) < rows:
            run = self._waiting.popleft()
            run.task = asyncio.create_task(self._make(app, run))

    async def _make(self, app: ASGIApp, run: _Run) -> None:
        identity = run.response.id
        try:
            await self._database.run(partial(table.begin, response_id=identity))
            async with while_running(self._flushing(run)):
                answer = await self._ask(app, run)
            changes = _outcome(run, answer)
        except Exception:
            logger.exception("%s could not be made", identity)
            changes = table.failure("Internal error.")
        if run.response.streams and changes["status"] == "failed":
            run.log.add(_failed_frame(run, changes))
        await self._flush(run)
        await self._database.run(partial(table.end, response_id=identity, changes=changes))
        run.log.end()
        self._runs.pop(identity, None)
        self._wake.set()

    async def _ask(self, app: ASGIApp, run: _Run) -> InsideAnswer:
        response = run.response
        assert response.request is not None
        stamp = {"background": True, "store": True, "created_at": response.created_at}
        tiers = (Tier(response.tier),)
        insider = Insider(response.owner, tiers, permitted=True, stamp=stamp)

        def take(chunk: bytes) -> None:
            if (frame := chunk.decode()).startswith(_EVENT):
                run.log.add(frame)

        while True:
            answer = await ask(app, Endpoint.RESPONSES.value, response.request, insider, take)
            if answer.status not in _COMES_BACK:
                return answer
            await asyncio.sleep(_PAUSE_S)

    async def _flushing(self, run: _Run) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self._flush(run)

    async def _flush(self, run: _Run) -> None:
        """Put what was shown on the disk."""
        log = run.log
        if new := log.frames[log.stored :]:
            work = partial(table.add_events, begin_at=log.stored, frames=new)
            await self._database.run(partial(work, response_id=run.response.id))
            log.stored += len(new)


def _outcome(run: _Run, answer: InsideAnswer) -> JsonObject:
    """Return what the request's answer makes of the response."""
    if answer.status != _OK:
        return table.failure(from_json(answer.body)["error"]["message"])
    if not run.response.streams:
        return dict(from_json(answer.body))
    last = data_of(run.log.frames[-1]) if run.log.frames else {}
    response = last.get("response") or {}
    if response.get("status") in ("completed", "incomplete"):
        return dict(response)
    return table.failure("The answer was cut off.")


def _failed_frame(run: _Run, changes: JsonObject) -> str:
    kind = "response.failed"
    data = {
        "type": kind,
        "sequence_number": len(run.log.frames),
        "response": run.response.shown() | changes,
    }
    return named_frame(kind, to_json(data))
