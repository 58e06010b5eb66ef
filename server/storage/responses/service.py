"""Stored responses: operations of the routes, and the background work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from server import bounds
from server.admission import Admission
from server.errors import InvalidValueError
from server.host.tasks import background_task, run_to_completion
from server.lifecycle import Lifecycle
from server.request.options import Tier
from server.request.record import RequestRecord
from server.settings import ServerSettings
from server.storage.jobs import RESPONSES
from server.storage.quotas import Reservation
from server.storage.responses import conversations, table
from server.storage.responses.response import Response, finished_response, queued_response
from server.storage.responses.runner import ResponseRunner
from server.storage.responses.storage_options import StorageOptions
from server.storage.store import Store
from server.wire.endpoint import JsonObject

logger = logging.getLogger(__name__)


class ResponseService:
    """Stored responses and conversations of the Responses API."""

    def __init__(
        self, store: Store, settings: ServerSettings, lifecycle: Lifecycle, admission: Admission
    ) -> None:
        self._store = store
        self._database = store.database
        self._keep_s = settings.response_retention_s
        self._quotas = store.quotas
        self._continued = conversations.ContinuedBytes()
        self._runner = ResponseRunner(store.database, lifecycle, admission)
        self.statuses: Mapping[str, int] = RESPONSES.no_rows()
        """Numbers of responses by status, at the last refresh."""

    @asynccontextmanager
    async def working(self, app: ASGIApp) -> AsyncIterator[None]:
        """Run background responses through `app` for the length of the block."""
        async with background_task(self._runner.run(app)):
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
        found = await self._database.read(conversations.find, owner, last, most)
        self._continued.hold(found.bytes, record)
        return await self._database.read(conversations.items_of, owner, found)

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
        await run_to_completion(self._queue(response, options))
        return response

    async def _queue(self, response: Response, options: StorageOptions) -> None:
        assert options.reservation is not None
        await asyncio.to_thread(self._store.folder.require, response.bytes)
        await self._database.run(table.queue, response, options.reservation)
        self._runner.add(table.Waiting(response.id, response.owner))

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
        log = self._runner.log_of(response.id)
        if log is not None:
            return log.follow(after)
        stored = await self._database.read(table.events, response.id, after)
        return _each(stored)

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
        await self._runner.stop(response_id)
        changes = {"status": "cancelled"}
        ended = await self._database.run(table.end, response_id, changes)
        return ended or await self.get(owner, response_id)

    async def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises `NotFoundError`."""
        await self.get(owner, response_id)
        await self._runner.stop(response_id)
        await self._database.run(table.delete, owner, response_id)

    async def refresh(self) -> None:
        """Delete expired responses and count the others."""
        if count := await self._database.run(table.delete_expired, self._store.clock.now()):
            logger.info("%d responses have expired", count)
        self.statuses = await self._database.read(RESPONSES.count_by_status)


async def _each(frames: list[str]) -> AsyncGenerator[str, None]:
    for frame in frames:
        yield frame
