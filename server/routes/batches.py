"""`/v1/files` and `/v1/batches`: OpenAI's batches, whose lines run in rows that would be padding.

Files are their input and their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from typing_extensions import TypedDict

from server import bounds
from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidTypeError,
    InvalidValueError,
    MediaTypeError,
    MissingFieldError,
    NotEnabledError,
    NotFoundError,
    StorageFullError,
    StorageUnavailableError,
    UnknownFieldError,
    describe,
    invalid_value,
)
from server.http.openapi import BODY_FAILURES, DescribedRoute, failing, taking
from server.request.body import read_json_object
from server.request.record import get_record
from server.request.rules import UnknownPolicy, known_fields, parse_body
from server.settings import ServerSettings
from server.storage.batch_table import LONGEST_S, SHORTEST_S, CreateBatchBody
from server.storage.batches import BatchService
from server.storage.database import Page
from server.storage.files import INPUT, FileObject, Upload
from server.wire import JsonObject

_MAX_FILES = 10_000
_MAX_DIGITS = 18
"""Maximum for a number in a query or a form."""
_FORM_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"const": INPUT},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "string"},
                    },
                    "required": ["file", "purpose"],
                }
            }
        },
    }
}
_UPLOADED = failing(
    MediaTypeError,
    MissingFieldError,
    InvalidValueError,
    UnknownFieldError,
    BodyTooLargeError,
    BodyTimeoutError,
    StorageFullError,
    NotEnabledError,
    StorageUnavailableError,
)
_KNOWN = failing(NotFoundError, NotEnabledError, StorageUnavailableError)
_LISTED_FILES = failing(
    NotEnabledError, NotFoundError, InvalidValueError, InvalidTypeError, StorageUnavailableError
)
_ORDER = Query(
    description="`asc` or `desc`, by creation.", json_schema_extra={"enum": ["asc", "desc"]}
)


class FileList(TypedDict):
    """A page of files, the newest first by default."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


def files_router(store: Callable[[], BatchService], settings: ServerSettings) -> APIRouter:
    """Return the routes; `store` raises `NotEnabledError` without --data-dir."""
    router = APIRouter(route_class=DescribedRoute)

    @router.post("/v1/files", response_model=FileObject, responses=_UPLOADED, openapi_extra=_UPLOAD)
    async def create(request: Request) -> Response:
        """Store a file, `purpose` batch: lines of requests."""
        files = store().files
        upload = Upload(request, bounds.UPLOAD_TIMEOUT_S)
        file = await files.create(
            get_owner(request), upload, lambda form: _checked_form(form, settings.unknown_fields)
        )
        return JSONResponse(file.shown())

    @router.get("/v1/files", response_model=FileList, responses=_LISTED_FILES)
    async def list_page(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: str = str(_MAX_FILES),
        order: Annotated[str, _ORDER] = "desc",
    ) -> JSONResponse:
        """List the files of the caller's API key."""
        files = store().files
        page = make_page(limit, _MAX_FILES, after, order)
        items, more = await files.list_files(get_owner(request), page, purpose)
        return JSONResponse(listed([file.shown() for file in items], has_more=more))

    @router.get("/v1/files/{file_id}/content", response_class=Response, responses=_KNOWN)
    async def content(file_id: str, request: Request) -> Response:
        """Return a file's content."""
        files = store().files
        file = await files.get(get_owner(request), file_id)
        path = files.content_path(file.id)
        if not path.is_file():
            raise NotFoundError(f"The content of {describe(file_id)} is gone.", param="file_id")
        return FileResponse(path, media_type="application/octet-stream", filename=file.name)

    @router.get("/v1/files/{file_id}", response_model=FileObject, responses=_KNOWN)
    async def show(file_id: str, request: Request) -> JSONResponse:
        """Return one file."""
        return JSONResponse((await store().files.get(get_owner(request), file_id)).shown())

    @router.delete("/v1/files/{file_id}", response_model=DeletedFile, responses=_KNOWN)
    async def delete(file_id: str, request: Request) -> JSONResponse:
        """Delete a file."""
        await store().files.delete(get_owner(request), file_id)
        return JSONResponse(DeletedFile(id=file_id, object="file", deleted=True))

    return router


def get_owner(request: Request) -> str:
    return get_record(request.scope).caller.owner


def make_page(limit: str, most: int, after: str | None, order: str) -> Page:
    """Return the requested page of a list. Raises `InvalidValueError`."""
    if not (_is_number(limit) and 1 <= int(limit) <= most):
        raise invalid_value("limit", f"be 1 to {most}", limit)
    if order not in ("asc", "desc"):
        raise invalid_value("order", "be 'asc' or 'desc'", order)
    return Page(int(limit), after or None, newest_first=order == "desc")


def listed(data: list[Any], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _checked_form(fields: dict[str, str], policy: UnknownPolicy) -> tuple[str, int | None]:
    """Return the purpose and the seconds to keep. Raises a `RequestError`."""
    fields = known_fields(fields, _FORM_FIELDS, policy)
    purpose = fields.get("purpose")
    if purpose is None:
        raise MissingFieldError("The field 'purpose' is missing.", param="purpose")
    if purpose != INPUT:
        raise invalid_value("purpose", f"be {INPUT!r}, the only supported one", purpose)
    anchor, seconds = fields.get(_FORM_FIELDS[1]), fields.get(_FORM_FIELDS[2])
    if anchor is None and seconds is None:
        return purpose, None
    digits = seconds if seconds is not None and _is_number(seconds) else "0"
    if anchor != "created_at" or not SHORTEST_S <= int(digits) <= LONGEST_S:
        raise InvalidValueError(
            f"'expires_after' must have the anchor 'created_at' and {SHORTEST_S} to {LONGEST_S} "
            f"seconds, got {describe(anchor)} and {describe(seconds)}.",
            param="expires_after",
        )
    return purpose, int(digits)


def _is_number(text: str) -> bool:
    """Return True for a number of at most `_MAX_DIGITS` ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


_MAX_BATCHES = 100
_CREATE_BATCH = failing(
    *BODY_FAILURES, NotFoundError, StorageFullError, NotEnabledError, StorageUnavailableError
)
_CHANGED_BATCH = failing(NotFoundError, InvalidValueError, NotEnabledError, StorageUnavailableError)


def batches_router(store: Callable[[], BatchService], settings: ServerSettings) -> APIRouter:
    """Return the routes; `store` raises `NotEnabledError` without --data-dir."""
    router = APIRouter(route_class=DescribedRoute)

    @router.post(
        "/v1/batches",
        response_model=JsonObject,
        responses=_CREATE_BATCH,
        openapi_extra=taking(CreateBatchBody.model_json_schema()),
    )
    async def create(request: Request) -> JSONResponse:
        """Answer the lines of a file; retries with one `Idempotency-Key` create one batch."""
        service = store()
        body = await read_json_object(request, settings)
        fields = parse_body(CreateBatchBody, body, settings.unknown_fields)
        key = request.headers.get("idempotency-key")
        batch = await service.create(get_owner(request), fields, key)
        return JSONResponse(batch.shown())

    @router.get("/v1/batches", response_model=JsonObject, responses=_CHANGED_BATCH)
    async def list_page(
        request: Request, after: str | None = None, limit: str = "20"
    ) -> JSONResponse:
        """List the batches of the caller's API key, the newest first."""
        service = store()
        page = make_page(limit, _MAX_BATCHES, after, "desc")
        items, more = await service.list_batches(get_owner(request), page)
        return JSONResponse(listed([batch.shown() for batch in items], has_more=more))

    @router.get("/v1/batches/{batch_id}", response_model=JsonObject, responses=_KNOWN)
    async def show(batch_id: str, request: Request) -> JSONResponse:
        """Return one batch."""
        return JSONResponse((await store().get(get_owner(request), batch_id)).shown())

    @router.post(
        "/v1/batches/{batch_id}/cancel", response_model=JsonObject, responses=_CHANGED_BATCH
    )
    async def cancel(batch_id: str, request: Request) -> JSONResponse:
        """Cancel a batch; lines that have been answered keep their results."""
        batch = await store().cancel(get_owner(request), batch_id)
        return JSONResponse(batch.shown())

    return router
