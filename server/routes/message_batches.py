"""`/v1/messages/batches`: Anthropic's batches, in the same store and runner as OpenAI's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from typing_extensions import TypedDict

from server.errors import (
    InvalidValueError,
    NotEnabledError,
    NotFoundError,
    StorageFullError,
    StorageUnavailableError,
)
from server.http.openapi import BODY_FAILURES, DescribedRoute, failing, taking
from server.request.body import read_body
from server.routes.files import owner_of, page_of
from server.settings import ServerSettings
from server.storage.batches.batch import Api
from server.storage.batches.message_batch import MessageBatch, results, shown
from server.storage.batches.message_requests import BODY_SCHEMA, lines_of
from server.storage.batches.service import BatchService

_MAX_LIMIT = 1000
_CREATE = failing(*(*BODY_FAILURES, StorageFullError, NotEnabledError, StorageUnavailableError))
_KNOWN = failing(NotFoundError, NotEnabledError, StorageUnavailableError)
_CHECKED = failing(NotFoundError, InvalidValueError, NotEnabledError, StorageUnavailableError)


class MessageBatchList(TypedDict):
    """A page of batches, the newest first."""

    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(TypedDict):
    """A deleted batch."""

    id: str
    type: Literal["message_batch_deleted"]


def message_batches_router(
    store: Callable[[], BatchService], settings: ServerSettings
) -> APIRouter:
    """Return the routes; `store` raises `NotEnabledError` without --data-dir."""
    router = APIRouter(route_class=DescribedRoute)
    read = partial(lines_of, warn=settings.unknown_fields == "warn")

    @router.post(
        "/v1/messages/batches",
        response_model=MessageBatch,
        responses=_CREATE,
        openapi_extra=taking(BODY_SCHEMA),
    )
    async def create(request: Request) -> Response:
        """Answer requests of Anthropic's Messages API in spare rows of the engine."""
        service = store()
        raw = await read_body(request, settings)
        # In a thread: there may be thousands.
        lines = await asyncio.to_thread(read, raw, settings.max_batch_lines)
        return JSONResponse(shown(await service.create_messages(owner_of(request), lines)))

    @router.get("/v1/messages/batches", response_model=MessageBatchList, responses=_CHECKED)
    async def list_page(
        request: Request,
        before_id: str | None = None,
        after_id: str | None = None,
        limit: str = "20",
    ) -> JSONResponse:
        """List the batches of the caller's API key, the newest first."""
        return JSONResponse(await _page(store(), owner_of(request), before_id, after_id, limit))

    _add_routes_of_one(router, store)
    return router


def _add_routes_of_one(router: APIRouter, store: Callable[[], BatchService]) -> None:
    @router.get("/v1/messages/batches/{batch_id}", response_model=MessageBatch, responses=_KNOWN)
    async def show(batch_id: str, request: Request) -> JSONResponse:
        """Return one batch."""
        return JSONResponse(shown(await store().get(owner_of(request), batch_id, Api.ANTHROPIC)))

    @router.get(
        "/v1/messages/batches/{batch_id}/results", response_class=Response, responses=_CHECKED
    )
    async def show_results(batch_id: str, request: Request) -> StreamingResponse:
        """Return the results of an ended batch as JSON lines, in any order."""
        paths = await store().result_paths(owner_of(request), batch_id, Api.ANTHROPIC)
        return StreamingResponse(results(paths), media_type="application/x-jsonl")

    @router.post(
        "/v1/messages/batches/{batch_id}/cancel", response_model=MessageBatch, responses=_CHECKED
    )
    async def cancel(batch_id: str, request: Request) -> JSONResponse:
        """Cancel a batch; requests that have been answered keep their results."""
        batch = await store().cancel(owner_of(request), batch_id, Api.ANTHROPIC)
        return JSONResponse(shown(batch))

    @router.delete(
        "/v1/messages/batches/{batch_id}", response_model=DeletedMessageBatch, responses=_CHECKED
    )
    async def delete(batch_id: str, request: Request) -> JSONResponse:
        """Delete an ended batch and its files."""
        await store().delete(owner_of(request), batch_id, Api.ANTHROPIC)
        return JSONResponse(DeletedMessageBatch(id=batch_id, type="message_batch_deleted"))


async def _page(
    service: BatchService, owner: str, before_id: str | None, after_id: str | None, limit: str
) -> MessageBatchList:
    if before_id and after_id:
        raise InvalidValueError("'before_id' and 'after_id' exclude each other.", param="before_id")
    page = page_of(limit, _MAX_LIMIT, before_id or after_id, "asc" if before_id else "desc")
    try:
        found, more = await service.list_batches(owner, page, Api.ANTHROPIC)
    except NotFoundError as error:
        name = "before_id" if before_id else "after_id"
        raise NotFoundError(error.message.replace("'after'", f"'{name}'"), param=name) from None
    data = [shown(batch) for batch in (reversed(found) if before_id else found)]
    return MessageBatchList(
        data=data,
        first_id=data[0]["id"] if data else None,
        last_id=data[-1]["id"] if data else None,
        has_more=more,
    )
