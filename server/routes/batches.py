"""`/v1/batches`: OpenAI's batches, whose lines run in rows that would be padding."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from server.errors import (
    InvalidValueError,
    NotEnabledError,
    NotFoundError,
    StorageFullError,
    StorageUnavailableError,
)
from server.http.openapi import BODY_FAILURES, DescribedRoute, failing, taking
from server.request.body import read_json_object
from server.request.rules import parse_body
from server.routes.files import listed, owner_of, page_of
from server.settings import ServerSettings
from server.storage.batches.bodies import CreateBatchBody, batch_request
from server.storage.batches.service import BatchService
from server.wire.endpoint import JsonObject

_MAX_LIMIT = 100
_CREATE = failing(
    *(*BODY_FAILURES, NotFoundError, StorageFullError, NotEnabledError, StorageUnavailableError)
)
_KNOWN = failing(NotFoundError, NotEnabledError, StorageUnavailableError)
_CHANGED = failing(NotFoundError, InvalidValueError, NotEnabledError, StorageUnavailableError)


def batches_router(store: Callable[[], BatchService], settings: ServerSettings) -> APIRouter:
    """Return the routes; `store` raises `NotEnabledError` without --data-dir."""
    router = APIRouter(route_class=DescribedRoute)

    @router.post(
        "/v1/batches",
        response_model=JsonObject,
        responses=_CREATE,
        openapi_extra=taking(CreateBatchBody.model_json_schema()),
    )
    async def create(request: Request) -> JSONResponse:
        """Answer the lines of a file; retries with one `Idempotency-Key` create one batch."""
        service = store()
        body = await read_json_object(request, settings)
        given = parse_body(CreateBatchBody, body, settings.unknown_fields)
        key = request.headers.get("idempotency-key")
        batch = await service.create(batch_request(given, owner_of(request), key))
        return JSONResponse(batch.shown())

    @router.get("/v1/batches", response_model=JsonObject, responses=_CHANGED)
    async def list_page(
        request: Request, after: str | None = None, limit: str = "20"
    ) -> JSONResponse:
        """List the batches of the caller's API key, the newest first."""
        service = store()
        page = page_of(limit, _MAX_LIMIT, after, "desc")
        found, more = await service.list_batches(owner_of(request), page)
        return JSONResponse(listed([batch.shown() for batch in found], has_more=more))

    @router.get("/v1/batches/{batch_id}", response_model=JsonObject, responses=_KNOWN)
    async def show(batch_id: str, request: Request) -> JSONResponse:
        """Return one batch."""
        return JSONResponse((await store().get(owner_of(request), batch_id)).shown())

    @router.post("/v1/batches/{batch_id}/cancel", response_model=JsonObject, responses=_CHANGED)
    async def cancel(batch_id: str, request: Request) -> JSONResponse:
        """Cancel a batch; lines that have been answered keep their results."""
        batch = await store().cancel(owner_of(request), batch_id)
        return JSONResponse(batch.shown())

    return router
