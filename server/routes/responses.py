"""The Responses API: its storage around the front end, and `/v1/responses/{id}`.

`POST /v1/responses` is one of the endpoints of `server.routes.inference`.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from msgspec import Raw
from typing_extensions import TypedDict

from server.errors import (
    InvalidValueError,
    NotEnabledError,
    NotFoundError,
    ServerError,
    StorageFullError,
    StorageUnavailableError,
    UnsupportedFieldError,
    invalid_value,
)
from server.frontend import Frontend, ParsedRequest
from server.http.openapi import DescribedRoute, failing
from server.http.streaming import HeldStream, SseResponse
from server.request.body import JSON_TYPE
from server.request.options import Tier
from server.request.record import RequestRecord, get_record
from server.routes.batches import get_owner, listed, make_page
from server.storage.raw_json import get_all_fields, get_string, make_object
from server.storage.response_table import StorageOptions, page_of_items
from server.storage.responses import END_EVENTS, ResponseService
from server.wire import Endpoint, JsonObject, data_text, named_frame

_MAX_LIMIT = 100
_KEEP_ALIVE_S = 15.0
"""Default of vLLM's flag; these routes work without an engine."""
_KNOWN = failing(NotFoundError, NotEnabledError, StorageUnavailableError)
_READ = failing(
    NotFoundError,
    NotEnabledError,
    InvalidValueError,
    UnsupportedFieldError,
    StorageUnavailableError,
)
_ORDER = Query(description="`asc` or `desc`.", json_schema_extra={"enum": ["asc", "desc"]})
_STREAM = Query(description="`true`: the events of a response with `background` and `stream`.")


class DeletedResponse(TypedDict):
    """A deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


def responses_router(service: Callable[[], ResponseService]) -> APIRouter:
    """Return the routes; `service` raises `NotEnabledError` without --data-dir."""
    router = APIRouter(route_class=DescribedRoute)

    @router.get("/v1/responses/{response_id}", response_model=JsonObject, responses=_READ)
    async def show(
        response_id: str,
        request: Request,
        stream: Annotated[str, _STREAM] = "false",
        starting_after: str | None = None,
    ) -> Response:
        """Return a response, or stream its events after the number `starting_after`."""
        stored = service()
        _refuse_include(request)
        response = await stored.get(get_owner(request), response_id)
        if stream not in ("true", "false"):
            raise invalid_value("stream", "be 'true' or 'false'", stream)
        if stream == "false":
            if starting_after is not None:
                raise InvalidValueError(
                    "'starting_after' needs 'stream=true'.", param="starting_after"
                )
            return Response(response.shown(), media_type=JSON_TYPE)
        number = "-1" if starting_after is None else starting_after
        if starting_after is not None and not (number.isascii() and number.isdigit()):
            raise invalid_value("starting_after", "be the number of an event", number)
        frames = await stored.follow(response, int(number[:12]))
        record = get_record(request.scope)
        record.stream = True
        return SseResponse(HeldStream(frames), record, _KEEP_ALIVE_S)

    @router.delete("/v1/responses/{response_id}", response_model=DeletedResponse, responses=_KNOWN)
    async def delete(response_id: str, request: Request) -> JSONResponse:
        """Delete a response; a running one is aborted."""
        await service().delete(get_owner(request), response_id)
        return JSONResponse(DeletedResponse(id=response_id, object="response", deleted=True))

    @router.post("/v1/responses/{response_id}/cancel", response_model=JsonObject, responses=_READ)
    async def cancel(response_id: str, request: Request) -> Response:
        """Cancel a background response; one that has ended is unchanged."""
        response = await service().cancel(get_owner(request), response_id)
        return Response(response.shown(), media_type=JSON_TYPE)

    @router.get(
        "/v1/responses/{response_id}/input_items", response_model=JsonObject, responses=_READ
    )
    async def input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: str = "20",
        order: Annotated[str, _ORDER] = "desc",
    ) -> Response:
        """List the items of a response's own input, the last first by default."""
        stored = service()
        _refuse_include(request)
        page = make_page(limit, _MAX_LIMIT, after, order)
        response = await stored.get(get_owner(request), response_id, with_input=True)
        items, more = page_of_items(response, page)
        return Response(make_object(listed(items, has_more=more)), media_type=JSON_TYPE)

    return router


def _refuse_include(request: Request) -> None:
    """Raise for `include`, which is supported only when a response is created."""
    for name in ("include", "include[]"):
        if name in request.query_params:
            raise UnsupportedFieldError(
                "'include' is not supported here: send it with the request for the response.",
                param="include",
            )


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
        extra_fields = dict(parsed.extra_fields)
        options = parsed.storage_options
        if options is not None:
            if options.previous is not None:
                extra_fields["previous_response_id"] = options.previous
            extra_fields["store"] = options.is_stored = await self._reserve(options, record)
            if record.internal is not None:
                extra_fields |= record.internal.extra_fields
        return parsed, extra_fields

    async def handle(
        self,
        endpoint: Endpoint,
        parsed: ParsedRequest,
        extra_fields: JsonObject,
        raw: bytes,
        request: Request,
    ) -> bytes | AsyncGenerator[str, None]:
        """Answer a request, or queue it for the background; see `server.frontend.Frontend`."""
        options, service = parsed.storage_options, self._service
        if options is None or service is None or not options.is_stored:
            return await self._frontend().handle(endpoint, parsed, extra_fields, request)
        record = get_record(request.scope)
        owner = record.caller.owner
        if options.background:
            tier = record.tier or Tier.DEFAULT
            # For requests that name no model.
            default = str((await self._frontend().models())[0]["id"])
            shown = {"model": default, **extra_fields}
            response = await service.begin(owner, options, raw, tier, shown)
            if options.stream:
                return await service.follow(response, -1)
            return response.shown()
        result = await self._frontend().handle(endpoint, parsed, extra_fields, request)
        if isinstance(result, bytes):
            is_stored = await _store(service, owner, options, result)
            return result if is_stored else _unstored(result)
        return _storing_end(service, owner, options, result)

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
    return make_object({**get_all_fields(whole), "store": False})


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
                event = get_all_fields(data_text(frame))
                whole = bytes(event["response"])
                if not await _store(service, owner, options, whole):
                    name = str(get_string(bytes(event["type"])))
                    data = make_object({**event, "response": Raw(_unstored(whole))})
                    frame = named_frame(name, data)
            yield frame
