"""What stands between a request of the Responses API and the front end: the conversation that it
continues is put before it, and its answer is kept.

Requests of other endpoints pass untouched.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from msgspec import Raw
from starlette.requests import Request

from server.errors import (
    ServerError,
    StorageFullError,
    StorageUnavailableError,
    UnsupportedFieldError,
)
from server.frontend import (
    Endpoint,
    Frontend,
    ReadRequest,
    StorageOptions,
    data_text,
    named_frame,
)
from server.request.record import RequestRecord, record_of
from server.responses.events import END_EVENTS
from server.responses.service import ResponseService
from server.storage.raw_json import all_fields_of, object_of, string_of
from server.tiers.tier import Tier

logger = logging.getLogger(__name__)

_OFF = "nothing is stored: this server was started without --data-dir"
_IN_LINES = "it is not for lines of a batch"


class ResponseStore:
    """Reads and answers requests over a front end."""

    def __init__(self, frontend: Callable[[], Frontend], service: ResponseService | None) -> None:
        """`service` is None without --data-dir: then nothing is kept."""
        self._frontend = frontend
        self._service = service

    async def read(self, endpoint: Endpoint, raw: bytes, record: RequestRecord) -> ReadRequest:
        """Return what a body asks for, behind the conversation that it continues.

        Raises the `ServerError` of what is wrong with it.
        """
        given = await self._frontend().read(endpoint, raw)
        options = given.storage_options
        if options is None:
            return given
        self._require_possible(options, record)
        if options.previous is not None:
            assert self._service is not None
            before = await self._service.conversation(record, options.previous)
            given = await self._frontend().read(endpoint, raw, before)
            given.stamp["previous_response_id"] = options.previous
        given.stamp["store"] = options.is_stored = await self._is_to_keep(options, record)
        if record.internal is not None:
            given.stamp |= record.internal.stamp
        given.storage_options = options
        return given

    async def handle(
        self, endpoint: Endpoint, given: ReadRequest, raw: bytes, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        """Answer a request, or have it answered meanwhile; see `server.frontend.Frontend`."""
        options, service = given.storage_options, self._service
        if options is None or service is None or not options.is_stored:
            return await self._frontend().handle(endpoint, given, request)
        record = record_of(request.scope)
        owner = record.owner
        if options.background:
            tier = record.tier or Tier.DEFAULT
            shown = {"model": await self._default_model(), **given.stamp}
            response = await service.begin(owner, options, raw, tier, shown)
            if options.stream:
                return await service.follow(response, -1)
            return response.shown()
        result = await self._frontend().handle(endpoint, given, request)
        if isinstance(result, bytes):
            return await _kept(service, owner, options, result)
        return _keeping_end(service, owner, options, result)

    async def _default_model(self) -> str:
        """Return the model that answers where a request names none."""
        return str((await self._frontend().models())[0]["id"])

    def _require_possible(self, options: StorageOptions, record: RequestRecord) -> None:
        wishes = {
            "store": options.store,
            "background": options.background,
            "previous_response_id": options.previous,
        }
        asked = next((name for name, wish in wishes.items() if wish), None)
        if asked is not None and self._service is None:
            raise UnsupportedFieldError(f"'{asked}' is not supported: {_OFF}.", param=asked)
        lines = record.internal is not None and not record.internal.permitted
        if lines and options.background:
            raise UnsupportedFieldError(f"'background': {_IN_LINES}.", param="background")

    async def _is_to_keep(self, options: StorageOptions, record: RequestRecord) -> bool:
        """Whether the answer is kept: by default where there is room, but for lines of batches."""
        if self._service is None or options.store is False:
            return False
        if record.internal is not None and not options.store:
            return False
        reservation = self._service.reservation(record.owner)
        record.on_end.append(reservation.release)
        try:
            await self._service.reserve(reservation, len(options.items))
        except (StorageFullError, StorageUnavailableError):
            if options.store or options.background:
                raise
            return False
        options.reservation = reservation
        return True


async def _kept(
    service: ResponseService, owner: str, options: StorageOptions, whole: bytes
) -> bytes:
    """Store an answer; return it with `store` false where it could not be, and need not."""
    return whole if await _is_kept(service, owner, options, whole) else _not_kept(whole)


def _not_kept(whole: bytes) -> bytes:
    """Return the text of a response that says that it is not kept."""
    return object_of({**all_fields_of(whole), "store": False})


async def _is_kept(
    service: ResponseService, owner: str, options: StorageOptions, whole: bytes
) -> bool:
    """Store an answer; return False where that failed. Raises if the request demands it."""
    try:
        await service.keep(owner, options, whole)
    except (ServerError, OSError, sqlite3.Error) as error:
        if options.store:
            raise
        logger.error("a response is not kept: %s", error)
        return False
    return True


async def _keeping_end(
    service: ResponseService, owner: str, options: StorageOptions, frames: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    """Keep the response of a stream before its last event is sent."""
    async with aclosing(frames):
        async for frame in frames:
            if frame.startswith(END_EVENTS):
                event = all_fields_of(data_text(frame))
                whole = bytes(event["response"])
                if not await _is_kept(service, owner, options, whole):
                    name = str(string_of(bytes(event["type"])))
                    data = object_of({**event, "response": Raw(_not_kept(whole))})
                    frame = named_frame(name, data)
            yield frame
