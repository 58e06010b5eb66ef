"""Runner of background responses: each is a loopback request.

A waiting response is a row of the database. Memory holds its id, and its event log if a client
reads it. Invariants: a response runs at most once at a time. After a crash or restart, an open
response runs again or fails with the reason (`server.storage.responses.table.unfinished`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from msgspec import Raw
from pydantic_core import from_json
from starlette.types import ASGIApp

from server.admission import Admission
from server.errors import StorageFullError, StorageUnavailableError
from server.host.tasks import background_task
from server.lifecycle import Lifecycle, ServicePhase
from server.request.options import Tier
from server.request.record import InternalRequest
from server.storage.database import Database, P, T, Work
from server.storage.jobs import JobLoop
from server.storage.loopback import LoopbackResponse, post_until_taken
from server.storage.raw_json import all_fields_of, fields_of, object_of
from server.storage.responses import table
from server.storage.responses.events import END_EVENTS, EventLog
from server.storage.responses.fair_queue import FairQueue
from server.storage.responses.response import Response
from server.storage.responses.table import Waiting
from server.wire.endpoint import Endpoint
from server.wire.frames import data_text, named_frame

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_FLUSH_S = 0.25
_DISK_PAUSE_S = 5.0
_OK = 200
_EVENTS = ("event: response.", "event: error\n")
_FRAME_END = "\n\n"


@dataclass(eq=False, slots=True)
class _Run:
    owner: str
    log: EventLog
    task: asyncio.Task[None]


class ResponseRunner:
    """Runs at most as many responses as the largest bucket has rows. Used from the event loop."""

    def __init__(self, database: Database, lifecycle: Lifecycle, admission: Admission) -> None:
        self._database = database
        self._lifecycle = lifecycle
        self._admission = admission
        self._waiting: dict[str, Waiting] = {}
        self._queue = FairQueue()
        self._runs: dict[str, _Run] = {}
        # Logs of waiting responses that a client reads.
        self._logs: WeakValueDictionary[str, EventLog] = WeakValueDictionary()
        self._loop = JobLoop("responses in the background", self._turn)
        self._app: ASGIApp | None = None

    def add(self, waiting: Waiting) -> None:
        """Queue a stored response."""
        self._waiting[waiting.id] = waiting
        self._queue.add(waiting)
        self._loop.wake()

    def log_of(self, response_id: str) -> EventLog | None:
        """Return the event log of a waiting or running response, None for another."""
        if (run := self._runs.get(response_id)) is not None:
            return run.log
        return self._log_of(response_id) if response_id in self._waiting else None

    async def run(self, app: ASGIApp) -> None:
        """Run responses through `app` until cancelled."""
        self._app = app
        for waiting in await self._database.run(table.unfinished):
            self.add(waiting)
        try:
            await self._loop.run()
        finally:
            for run in self._runs.values():
                run.task.cancel()

    async def stop(self, response_id: str) -> None:
        """Remove a waiting response, or abort a running one."""
        if (waiting := self._waiting.pop(response_id, None)) is not None:
            self._queue.remove(waiting)
            self._log_of(response_id).end()
        elif (run := self._runs.pop(response_id, None)) is not None:
            run.task.cancel()
            await asyncio.wait({run.task})
            run.log.end()

    def _log_of(self, response_id: str) -> EventLog:
        log = self._logs.get(response_id) or EventLog()
        self._logs[response_id] = log
        return log

    async def _turn(self) -> float | None:
        self._start_runs()
        # Free rows wake nothing, a new response wakes the loop.
        return _TICK_S if self._waiting else None

    def _start_runs(self) -> None:
        rows = self._admission.rows[-1] if self._lifecycle.phase is ServicePhase.READY else 0
        while len(self._runs) < rows:
            running = Counter(run.owner for run in self._runs.values())
            if (waiting := self._queue.take(running)) is None:
                return
            del self._waiting[waiting.id]
            log = self._log_of(waiting.id)
            task = asyncio.create_task(self._run_safely(waiting.id, log))
            self._runs[waiting.id] = _Run(waiting.owner, log, task)

    async def _run_safely(self, identity: str, log: EventLog) -> None:
        try:
            response = await self._store(table.begin, identity)
            if response is not None:
                await self._run_begun(response, log)
        except Exception:
            logger.exception("%s could not be stored", identity)
        finally:
            log.end()
            self._runs.pop(identity, None)
            self._loop.wake()

    async def _run_begun(self, response: Response, log: EventLog) -> None:
        identity = response.id
        try:
            async with background_task(self._flushing(identity, log)):
                answer = await self._send(response, log)
            changes = _outcome(response, log, answer)
        except Exception:
            logger.exception("%s could not be run", identity)
            changes = table.failure("Internal error.")
        if response.streams and not _has_ended(log):
            log.add(_failed_frame(response, log, changes))
        await self._flush(identity, log)
        await self._store(table.end, identity, changes)

    async def _send(self, response: Response, log: EventLog) -> LoopbackResponse:
        assert self._app is not None
        assert response.request is not None
        stamp = {"background": True, "store": True, "created_at": response.created_at}
        tiers = (Tier(response.tier),)
        internal = InternalRequest(
            response.owner, tiers, permitted=True, stamp=stamp, response_id=response.id
        )

        def take(chunk: bytes) -> None:
            for frame in chunk.decode().split(_FRAME_END):
                if frame.startswith(_EVENTS):
                    log.add(frame + _FRAME_END)

        return await post_until_taken(
            self._app, Endpoint.RESPONSES.value, response.request, internal, take
        )

    async def _flushing(self, response_id: str, log: EventLog) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self._flush(response_id, log)

    async def _flush(self, response_id: str, log: EventLog) -> None:
        """Store the new events of a log."""
        if new := log.frames[log.stored :]:
            await self._store(table.add_events, response_id, log.stored, new)
            log.stored += len(new)

    async def _store(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in the database; retries every 5 s while the disk is full or fails."""
        while True:
            try:
                return await self._database.run(work, *args, **kwargs)
            except (StorageFullError, StorageUnavailableError) as error:
                logger.error("responses in the background wait for the disk: %s", error)
                await asyncio.sleep(_DISK_PAUSE_S)


def _outcome(response: Response, log: EventLog, answer: LoopbackResponse) -> dict[str, Any]:
    """Return the changes of a response from the answer to its request, as JSON texts."""
    if answer.status != _OK:
        return table.failure(from_json(answer.body)["error"]["message"])
    if not response.streams:
        return dict(all_fields_of(answer.body))
    if _has_ended(log):
        return dict(all_fields_of(fields_of(data_text(log.frames[-1]), "response")["response"]))
    return table.failure("The answer was cut off.")


def _has_ended(log: EventLog) -> bool:
    """Return whether the last event contains the final response."""
    return bool(log.frames) and log.frames[-1].startswith(END_EVENTS)


def _failed_frame(response: Response, log: EventLog, changes: dict[str, Any]) -> str:
    kind = "response.failed"
    shown = object_of({**all_fields_of(response.shown()), **changes})
    data = {"type": kind, "sequence_number": len(log.frames), "response": Raw(shown)}
    return named_frame(kind, object_of(data))
