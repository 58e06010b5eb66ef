"""Layer of the Responses API over the front end.

It inserts the conversation that a request continues, and stores the response. Requests of other
endpoints pass unchanged.
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
from server.frontend import Frontend, ParsedRequest
from server.request.options import Tier
from server.request.record import RequestRecord, record_of
from server.storage.raw_json import all_fields_of, object_of, string_of
from server.storage.responses.events import END_EVENTS
from server.storage.responses.service import ResponseService
from server.storage.responses.storage_options import StorageOptions
from server.wire.endpoint import Endpoint, JsonObject
from server.wire.sse import data_text, named_frame

logger = logging.getLogger(__name__)

_OFF = "nothing is stored: this server was started without --data-dir"


class ResponseStore:
    """Reads and answers requests through a front end."""

    def __init__(self, frontend: Callable[[], Frontend], service: ResponseService | None) -> None:
        """Create the layer; `service` is None without --data-dir."""
        self._frontend = frontend
        self._service = service

    async def read(
        self, endpoint: Endpoint, raw: bytes, record: RequestRecord
    ) -> tuple[ParsedRequest, JsonObject]:
        """Return a parsed body, after the conversation that it continues, and its answer's fields.

        Raises the `ServerError` of the first invalid field.
        """
        read = await self._frontend().read(endpoint, raw)
        options = read if isinstance(read, StorageOptions) else read.storage_options
        if options is not None:
            self._check_supported(options, record)
        if isinstance(read, StorageOptions):
            assert self._service is not None
            assert read.previous is not None
            before = await self._service.conversation(record, read.previous)
            parsed = await self._frontend().read(endpoint, raw, before)
            assert isinstance(parsed, ParsedRequest)
        else:
            parsed = read
        stamp = dict(parsed.stamp)
        options = parsed.storage_options
        if options is not None:
            if options.previous is not None:
                stamp["previous_response_id"] = options.previous
            stamp["store"] = options.is_stored = await self._reserve(options, record)
            if record.internal is not None:
                stamp |= record.internal.stamp
        return parsed, stamp

    async def handle(
        self,
        endpoint: Endpoint,
        parsed: ParsedRequest,
        stamp: JsonObject,
        raw: bytes,
        request: Request,
    ) -> bytes | AsyncGenerator[str, None]:
        """Answer a request, or queue it for the background; see `server.frontend.Frontend`."""
        options, service = parsed.storage_options, self._service
        if options is None or service is None or not options.is_stored:
            return await self._frontend().handle(endpoint, parsed, stamp, request)
        record = record_of(request.scope)
        owner = record.caller.owner
        if options.background:
            tier = record.tier or Tier.DEFAULT
            shown = {"model": await self._default_model(), **stamp}
            response = await service.begin(owner, options, raw, tier, shown)
            if options.stream:
                return await service.follow(response, -1)
            return response.shown()
        result = await self._frontend().handle(endpoint, parsed, stamp, request)
        if isinstance(result, bytes):
            is_stored = await _store(service, owner, options, result)
            return result if is_stored else _unstored(result)
        return _storing_end(service, owner, options, result)

    async def _default_model(self) -> str:
        """Return the model for requests that name none."""
        return str((await self._frontend().models())[0]["id"])

    def _check_supported(self, options: StorageOptions, record: RequestRecord) -> None:
        fields = {
            "store": options.store,
            "background": options.background,
            "previous_response_id": options.previous,
        }
        used = next((name for name, value in fields.items() if value), None)
        if used is not None and self._service is None:
            raise UnsupportedFieldError(f"'{used}' is not supported: {_OFF}.", param=used)
        is_line = record.internal is not None and not record.internal.permitted
        if is_line and options.background:
            raise UnsupportedFieldError(
                "'background' is not supported in lines of a batch.", param="background"
            )

    async def _reserve(self, options: StorageOptions, record: RequestRecord) -> bool:
        """Reserve storage for the response; return False if it is not stored.

        By default responses are stored while quotas allow, those of batch lines are not. Raises
        `StorageFullError` and `StorageUnavailableError` if the request demands storage.
        """
        if self._service is None or options.store is False:
            return False
        if record.internal is not None and not options.store:
            return False
        reservation = self._service.reservation(record.caller.owner)
        record.on_end.append(reservation.release)
        try:
            await self._service.reserve(reservation, len(options.items))
        except (StorageFullError, StorageUnavailableError):
            if options.store or options.background:
                raise
            return False
        options.reservation = reservation
        return True


def _unstored(whole: bytes) -> bytes:
    """Set `store` to false in the JSON text of a response."""
    return object_of({**all_fields_of(whole), "store": False})


async def _store(
    service: ResponseService, owner: str, options: StorageOptions, whole: bytes
) -> bool:
    """Store a response; return False on failure. Raises if the request demands storage."""
    try:
        await service.store(owner, options, whole)
    except (ServerError, OSError, sqlite3.Error) as error:
        if options.store:
            raise
        logger.error("a response cannot be stored: %s", error)
        return False
    return True


async def _storing_end(
    service: ResponseService, owner: str, options: StorageOptions, frames: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
    """Store the response of a stream before its last event is sent."""
    async with aclosing(frames):
        async for frame in frames:
            if frame.startswith(END_EVENTS):
                event = all_fields_of(data_text(frame))
                whole = bytes(event["response"])
                if not await _store(service, owner, options, whole):
                    name = str(string_of(bytes(event["type"])))
                    data = object_of({**event, "response": Raw(_unstored(whole))})
                    frame = named_frame(name, data)
            yield frame
