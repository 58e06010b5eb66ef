"""`/v1/responses/{id}`: stored responses, including those that run in the background.

`POST /v1/responses` is one of the endpoints of `server.routes.inference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import TypedDict

from server.errors import (
    InvalidValueError,
    NotEnabledError,
    NotFoundError,
    StorageUnavailableError,
    UnsupportedFieldError,
    describe,
)
from server.http.openapi import DescribedRoute, failing
from server.http.streaming import HeldStream, SseResponse
from server.request.body import JSON_TYPE
from server.request.record import record_of
from server.routes.files import listed, owner_of, page_of
from server.storage.raw_json import object_of
from server.storage.responses.input_items import page_of_items
from server.storage.responses.service import ResponseService
from server.wire.endpoint import JsonObject

_MAX_LIMIT = 100
_KEEP_ALIVE_S = 15.0
"""Default of vLLM's flag; these routes work without an engine."""
_KNOWN = failing(NotFoundError, NotEnabledError, StorageUnavailableError)
_READ = failing(
    *(NotFoundError, NotEnabledError, InvalidValueError, UnsupportedFieldError),
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
        response = await stored.get(owner_of(request), response_id)
        if not _is_true(stream):
            if starting_after is not None:
                raise InvalidValueError(
                    "'starting_after' needs 'stream=true'.", param="starting_after"
                )
            return Response(response.shown(), media_type=JSON_TYPE)
        frames = await stored.follow(response, _number(starting_after))
        record = record_of(request.scope)
        record.stream = True
        return SseResponse(HeldStream([], None, frames), record, _KEEP_ALIVE_S)

    @router.delete("/v1/responses/{response_id}", response_model=DeletedResponse, responses=_KNOWN)
    async def delete(response_id: str, request: Request) -> JSONResponse:
        """Delete a response; a running one is aborted."""
        await service().delete(owner_of(request), response_id)
        return JSONResponse(DeletedResponse(id=response_id, object="response", deleted=True))

    @router.post("/v1/responses/{response_id}/cancel", response_model=JsonObject, responses=_READ)
    async def cancel(response_id: str, request: Request) -> Response:
        """Cancel a background response; one that has ended is unchanged."""
        response = await service().cancel(owner_of(request), response_id)
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
        page = page_of(limit, _MAX_LIMIT, after, order)
        response = await stored.get(owner_of(request), response_id, with_input=True)
        items, more = page_of_items(response, page)
        return Response(object_of(listed(items, has_more=more)), media_type=JSON_TYPE)

    return router


def _refuse_include(request: Request) -> None:
    """Raise for `include`, which is supported only when a response is created."""
    for name in ("include", "include[]"):
        if name in request.query_params:
            raise UnsupportedFieldError(
                "'include' is not supported here: send it with the request for the response.",
                param="include",
            )


def _is_true(given: str) -> bool:
    if given not in ("true", "false"):
        raise InvalidValueError(
            f"'stream' must be 'true' or 'false', got {describe(given)}.", param="stream"
        )
    return given == "true"


def _number(given: str | None) -> int:
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit()):
        raise InvalidValueError(
            f"'starting_after' must be the number of an event, got {describe(given)}.",
            param="starting_after",
        )
    return int(given[:12])
