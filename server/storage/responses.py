"""Stored responses: operations of the routes, and the runner of background responses.

A background response is a loopback request. A waiting one is a row of the database; memory holds
its id, and its event log if a client reads it. Invariants: a response runs at most once at a time.
After a crash or restart, an open response runs again or fails with the reason
(`server.storage.response_table.unfinished`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from msgspec import Raw
from pydantic_core import from_json
from starlette.types import ASGIApp

from server import bounds
from server.admission import Admission
from server.errors import InvalidValueError, StorageFullError, StorageUnavailableError
from server.host.tasks import background_task, run_to_completion
from server.lifecycle import Lifecycle, ServicePhase
from server.request.options import Tier
from server.request.record import InternalRequest, RequestRecord
from server.settings import ServerSettings
from server.storage import response_table as table
from server.storage.database import RESPONSES, P, Reservation, Store, T, Work
from server.storage.jobs import JobLoop, LoopbackResponse, post_until_accepted
from server.storage.raw_json import get_all_fields, get_fields, make_object
from server.storage.response_table import (
    Response,
    StorageOptions,
    Waiting,
    finished_response,
    queued_response,
)
from server.wire import Endpoint, JsonObject, data_text, named_frame

END_EVENTS = tuple(f"event: response.{kind}\n" for kind in ("completed", "incomplete", "failed"))
"""First lines of the frames that contain the final response."""


class EventLog:
    """Frames numbered from 0. Used from the event loop."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.stored = 0
        """Number of frames on the disk."""
        self._ended = False
        self._changed = asyncio.Event()

    def add(self, frame: str) -> None:
        self.frames.append(frame)
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    async def follow(self, after: int) -> AsyncGenerator[str, None]:
        """Yield the frames after the number `after`, as they arrive."""
        number = after + 1
        while True:
            changed = self._changed
            while number < len(self.frames):
                yield self.frames[number]
                number += 1
            if self._ended:
                return
            await changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class FairQueue:
    """Queue of response ids, by owner. Used from the event loop.

    The next response is that of the owner with the fewest running ones; among equals, of the owner
    that was served least recently.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, waiting: Waiting) -> None:
        self._waiting.setdefault(waiting.owner, deque()).append(waiting.id)

    def remove(self, waiting: Waiting) -> None:
        self._waiting[waiting.owner].remove(waiting.id)
        self._drop_empty(waiting.owner)

    def take(self, running: Counter[str]) -> Waiting | None:
        """Remove and return the next response; `running` counts running ones by owner."""
        if not self._waiting:
            return None
        owner = min(self._waiting, key=running.__getitem__)
        response = Waiting(self._waiting[owner].popleft(), owner)
        # Move the owner to the end of the order for equals.
        self._waiting[owner] = self._waiting.pop(owner)
        self._drop_empty(owner)
        return response

    def _drop_empty(self, owner: str) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]


logger = logging.getLogger(__name__)

_TICK_S = 0.1
_FLUSH_S = 0.25
_DISK_PAUSE_S = 5.0
_EVENTS = ("event: response.", "event: error\n")
_FRAME_END = "\n\n"


@dataclass(eq=False, slots=True)
class _Run:
    owner: str
    log: EventLog
    task: asyncio.Task[None]


class ResponseService:
    """Stored responses and conversations of the Responses API. Used from the event loop.

    At most as many background responses run as the largest bucket has rows.
    """

    def __init__(
        self, store: Store, settings: ServerSettings, lifecycle: Lifecycle, admission: Admission
    ) -> None:
        self._store = store
        self._database = store.database
        self._quotas = store.quotas
        self._lifecycle = lifecycle
        self._admission = admission
        self._keep_s = settings.response_retention_s
        self._continued = table.ContinuedBytes()
        self.statuses: Mapping[str, int] = RESPONSES.no_rows()
        """Numbers of responses by status, at the last refresh."""
        self._waiting: dict[str, Waiting] = {}
        self._queue = FairQueue()
        self._runs: dict[str, _Run] = {}
        # Logs of waiting responses that a client reads.
        self._logs: WeakValueDictionary[str, EventLog] = WeakValueDictionary()
        self._loop = JobLoop("responses in the background", self._turn)
        self._app: ASGIApp | None = None

    @asynccontextmanager
    async def working(self, app: ASGIApp) -> AsyncIterator[None]:
        """Run background responses through `app` for the length of the block."""
        async with background_task(self._run(app)):
            yield

    def reservation(self, owner: str) -> Reservation:
        """Return a reservation for one response, which is not held yet."""
        return Reservation(self._quotas, owner, "responses")

    async def reserve(self, reservation: Reservation, size: int) -> None:
        """Reserve storage for a response of at least `size` bytes. Raises `StorageFullError`."""
        await asyncio.to_thread(self._store.folder.require, size)
        await self._database.run(self._quotas.reserve, reservation, size)

    async def conversation(self, record: RequestRecord, last: str) -> bytes:
        """Return all turns up to `last` as a JSON array of items.

        Its bytes count until the request of `record` ends. Raises `NotFoundError`,
        `InvalidValueError`, `OverloadedError`.
        """
        owner, most = record.caller.owner, bounds.MAX_CONVERSATION_BYTES
        found = await self._database.read(table.find_conversation, owner, last, most)
        self._continued.hold(found.bytes, record)
        return await self._database.read(table.conversation_items, owner, found)

    async def store(self, owner: str, options: StorageOptions, whole: bytes) -> None:
        """Store the response with the JSON text `whole`. Raises `StorageFullError`."""
        assert options.reservation is not None
        response = finished_response(
            owner, options.previous, options.items, whole, keep_s=self._keep_s
        )
        await asyncio.to_thread(self._store.folder.require, response.bytes)
        await self._database.run(table.insert, response, options.reservation)

    async def begin(
        self, owner: str, options: StorageOptions, raw: bytes, tier: Tier, shown: JsonObject
    ) -> Response:
        """Queue a background response for the body `raw`; `shown` has the fields that it shows.

        Raises `StorageFullError`, and `OverloadedError` if too many wait or run.
        """
        response = await asyncio.to_thread(
            queued_response, owner, options, raw, tier, shown=shown, keep_s=self._keep_s
        )

        async def queue() -> None:
            assert options.reservation is not None
            await asyncio.to_thread(self._store.folder.require, response.bytes)
            await self._database.run(table.queue, response, options.reservation)
            self._add(table.Waiting(response.id, response.owner))

        await run_to_completion(queue())
        return response

    async def get(self, owner: str, response_id: str, *, with_input: bool = False) -> Response:
        """Return a response. Raises `NotFoundError`."""
        return await self._database.read(table.get, owner, response_id, with_input=with_input)

    async def follow(self, response: Response, after: int) -> AsyncGenerator[str, None]:
        """Yield the events after the number `after`, as they arrive. Raises `InvalidValueError`."""
        if not (response.background and response.streams):
            raise InvalidValueError(
                f"The response {response.id} has no stored events: they require 'background' and "
                "'stream'.",
                param="stream",
            )
        log = self._active_log(response.id)
        if log is not None:
            return log.follow(after)
        stored = await self._database.read(table.events, response.id, after)

        async def each() -> AsyncGenerator[str, None]:
            for frame in stored:
                yield frame

        return each()

    async def cancel(self, owner: str, response_id: str) -> Response:
        """Cancel a background response; one that has ended is unchanged.

        Raises `NotFoundError`, `InvalidValueError`.
        """
        response = await self.get(owner, response_id)
        if not response.background:
            raise InvalidValueError(
                f"The response {response.id} cannot be cancelled: it was created without "
                "'background'.",
                param="response_id",
            )
        await self._stop(response_id)
        ended = await self._database.run(table.end, response_id, {"status": "cancelled"})
        return ended or await self.get(owner, response_id)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises `NotFoundError`."""
        await self.get(owner, response_id)
        await self._stop(response_id)
        await self._database.run(table.delete, owner, response_id)

    async def refresh(self) -> None:
        """Delete expired responses and count the others."""
        if count := await self._database.run(table.delete_expired, self._store.clock.now()):
            logger.info("%d responses have expired", count)
        self.statuses = await self._database.read(RESPONSES.count_by_status)

    # Responses in the background.

    def _add(self, waiting: Waiting) -> None:
        self._waiting[waiting.id] = waiting
        self._queue.add(waiting)
        self._loop.wake()

    def _active_log(self, response_id: str) -> EventLog | None:
        """Return the event log of a waiting or running response, None for another."""
        if (run := self._runs.get(response_id)) is not None:
            return run.log
        return self._get_log(response_id) if response_id in self._waiting else None

    async def _run(self, app: ASGIApp) -> None:
        """Run responses through `app` until cancelled."""
        self._app = app
        for waiting in await self._database.run(table.unfinished):
            self._add(waiting)
        try:
            await self._loop.run()
        finally:
            for run in self._runs.values():
                run.task.cancel()

    async def _stop(self, response_id: str) -> None:
        """Remove a waiting response, or abort a running one."""
        if (waiting := self._waiting.pop(response_id, None)) is not None:
            self._queue.remove(waiting)
            self._get_log(response_id).end()
        elif (run := self._runs.pop(response_id, None)) is not None:
            run.task.cancel()
            await asyncio.wait({run.task})
            run.log.end()

    def _get_log(self, response_id: str) -> EventLog:
        log = self._logs.get(response_id) or EventLog()
        self._logs[response_id] = log
        return log

    async def _turn(self) -> float | None:
        rows = self._admission.rows[-1] if self._lifecycle.phase is ServicePhase.READY else 0
        while len(self._runs) < rows:
            running = Counter(run.owner for run in self._runs.values())
            if (waiting := self._queue.take(running)) is None:
                break
            del self._waiting[waiting.id]
            log = self._get_log(waiting.id)
            task = asyncio.create_task(self._run_one(waiting.id, log))
            self._runs[waiting.id] = _Run(waiting.owner, log, task)
        # Free rows wake nothing, a new response wakes the loop.
        return _TICK_S if self._waiting else None

    async def _run_one(self, identity: str, log: EventLog) -> None:
        try:
            response = await self._write(table.begin, identity)
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

        async def flush_repeatedly() -> None:
            while True:
                await asyncio.sleep(_FLUSH_S)
                await self._flush(identity, log)

        try:
            async with background_task(flush_repeatedly()):
                answer = await self._send(response, log)
            changes = _outcome(response, log, answer)
        except Exception:
            logger.exception("%s could not be run", identity)
            changes = table.failure("Internal error.")
        if response.streams and not _has_ended(log):
            kind = "response.failed"
            shown = make_object({**get_all_fields(response.shown()), **changes})
            data = {"type": kind, "sequence_number": len(log.frames), "response": Raw(shown)}
            log.add(named_frame(kind, make_object(data)))
        await self._flush(identity, log)
        await self._write(table.end, identity, changes)

    async def _send(self, response: Response, log: EventLog) -> LoopbackResponse:
        assert self._app is not None
        assert response.request is not None
        internal = InternalRequest(
            response.owner,
            (Tier(response.tier),),
            permitted=True,
            extra_fields={"background": True, "store": True, "created_at": response.created_at},
            response_id=response.id,
        )

        def on_chunk(chunk: bytes) -> None:
            for frame in chunk.decode().split(_FRAME_END):
                if frame.startswith(_EVENTS):
                    log.add(frame + _FRAME_END)

        return await post_until_accepted(
            self._app, Endpoint.RESPONSES.value, response.request, internal, on_chunk
        )

    async def _flush(self, response_id: str, log: EventLog) -> None:
        if new := log.frames[log.stored :]:
            await self._write(table.add_events, response_id, log.stored, new)
            log.stored += len(new)

    async def _write(self, work: Work[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in the database; retries every 5 s while the disk is full or fails."""
        while True:
            try:
                return await self._database.run(work, *args, **kwargs)
            except (StorageFullError, StorageUnavailableError) as error:
                logger.error("responses in the background wait for the disk: %s", error)
                await asyncio.sleep(_DISK_PAUSE_S)


def _outcome(response: Response, log: EventLog, answer: LoopbackResponse) -> dict[str, Any]:
    """Return the changes of a response from the answer to its request, as JSON texts."""
    if answer.status != 200:
        return table.failure(from_json(answer.body)["error"]["message"])
    if not response.streams:
        return dict(get_all_fields(answer.body))
    if _has_ended(log):
        return dict(get_all_fields(get_fields(data_text(log.frames[-1]), "response")["response"]))
    return table.failure("The answer was cut off.")


def _has_ended(log: EventLog) -> bool:
    """Return whether the last event contains the final response."""
    return bool(log.frames) and log.frames[-1].startswith(END_EVENTS)
