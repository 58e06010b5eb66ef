"""The endpoints that need the engine: body in, JSON or SSE out, abort when the client goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from server.errors import BodyTooLargeError, InvalidJsonError, MediaTypeError
from server.frontend import Endpoint, Frontend, JsonObject
from server.request_record import record_of
from server.settings import ServerSettings
from server.streaming import ClientGoneError, SseResponse, commit, until_disconnect

_JSON = "application/json"
_GONE = 499
_PRELUDE = (":", "event: response.created", "event: response.in_progress")
"""Frames sent before the engine has said anything: comments, the Responses API's first two."""


def add_inference_routes(
    app: Starlette, frontend: Callable[[], Frontend], settings: ServerSettings
) -> None:
    """Add one POST route per endpoint; the gate has made sure that there is a front end."""
    for endpoint in Endpoint:
        handler = _handler(endpoint, frontend, settings)
        app.add_route(endpoint.value, handler, methods=["POST"], name=endpoint.name.lower())


def _handler(
    endpoint: Endpoint, frontend: Callable[[], Frontend], settings: ServerSettings
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(body: JsonObject, request: Request) -> Response:
        result = await frontend().handle(endpoint, body, request)
        if isinstance(result, bytes):
            return Response(result, media_type=_JSON)
        record = record_of(request.scope)
        record.stream = True
        frames = await commit(result, _is_prelude, settings.stream_commit_s)
        return SseResponse(frames, endpoint, record)

    async def handle(request: Request) -> Response:
        body = await read_json_object(request, settings.max_body_bytes)
        try:
            return await until_disconnect(request.receive, respond(body, request))
        except ClientGoneError:
            record_of(request.scope).outcome = "aborted"
            return Response(status_code=_GONE)

    return handle


def _is_prelude(frame: str) -> bool:
    return frame.startswith(_PRELUDE)


async def read_json_object(request: Request, max_bytes: int) -> JsonObject:
    """Return the body as a JSON object.

    Raises `MediaTypeError`, `BodyTooLargeError` (also without a Content-Length, after at most
    `max_bytes`) or `InvalidJsonError`.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != _JSON:
        raise MediaTypeError(f"The content type must be {_JSON}, got {media_type!r}.")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            # The rest is read and dropped: closing now could take the answer along.
            raise BodyTooLargeError(
                f"The request body is larger than the limit of {max_bytes} bytes."
            )
        chunks.append(chunk)
    try:
        body = from_json(b"".join(chunks), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidJsonError(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidJsonError(
            f"The request body must be a JSON object, got {type(body).__name__}."
        )
    return body
