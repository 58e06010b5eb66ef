"""The inference endpoints: JSON or SSE responses, aborted when the client disconnects."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import cast

from msgspec import Raw
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from server import bounds
from server.admission import Admission
from server.errors import InvalidJsonError, OverloadedError, QueueTimeoutError
from server.frontend import Frontend, ParsedRequest
from server.http.streaming import COMMENT, PING, SseResponse, commit, until_disconnect
from server.request.body import JSON_TYPE, read_body
from server.request.endpoints import ADAPTER_HEADER, INVOCATIONS, check_session, invoked_endpoint
from server.request.options import TIER_FIELD, Tier, granted_tier
from server.request.record import RequestRecord, get_deadline
from server.request.tables import MAX_TOKENS_FIELDS
from server.routes.responses import ResponseStore
from server.settings import ServerSettings
from server.storage.raw_json import JsonSyntaxError, ShapeError, decode, with_fields
from server.wire import Endpoint, JsonObject, PromptProgress, chunk_head

_PRELUDE = (":", "event: response.created", "event: response.in_progress")
"""Frames sent before the engine's first output: comments, the Responses API's first two."""


def add_inference_routes(
    app: Starlette,
    frontend: Callable[[], Frontend],
    store: ResponseStore,
    settings: ServerSettings,
    admission: Admission,
) -> None:
    """Add a POST route per endpoint; the gate passes requests only once there is a front end."""

    async def respond(endpoint: Endpoint, raw: bytes, request: Request) -> Response:
        # Held until the last byte of the response. A small body is parsed without an await, so that
        # no other request is admitted before the permit grows to all of its sequences.
        record: RequestRecord = request.state.record
        engine = frontend()
        # Batch lines use spare capacity and need no permit.
        takes = record.internal is None or record.internal.permitted
        permit = admission.acquire(record.caller.owner) if takes else None
        if permit is not None:
            record.on_end.append(permit.release)
        extra_fields: JsonObject = {}
        if endpoint.takes_items:
            parsed, extra_fields = await store.read(endpoint, raw, record)
        else:
            # Only a request of the Responses API can continue a stored one.
            parsed = cast("ParsedRequest", await engine.read(endpoint, raw))
        record.tier = granted_tier(parsed.tier, record.caller.tiers)
        shows_tier = parsed.storage_options is not None or parsed.tier is not None
        if shows_tier or record.tier is not Tier.DEFAULT:
            extra_fields[TIER_FIELD] = record.tier.value
        record.bounds_answer = any(parsed.fields.get(name) for name in MAX_TOKENS_FIELDS)
        if permit is not None and parsed.storage_options and parsed.storage_options.background:
            # A background response takes its own permit when it runs.
            permit.release()
        elif permit is not None:
            permit.grow(parsed.answers)
            if record.tier is Tier.FLEX:
                permit.move_to_flex()
        if record.internal is None and parsed.fields.get("stream"):
            head = None
            if parsed.returns_progress:
                model = parsed.fields.get("model") or (await engine.models())[0]["id"]
                head = chunk_head(endpoint, record.request_id, str(model))
            record.progress = PromptProgress(head)
        if parsed.storage_options is not None:
            result = await store.handle(endpoint, parsed, extra_fields, raw, request)
        else:
            result = await engine.handle(endpoint, parsed, extra_fields, request)
        if isinstance(result, bytes):
            return Response(result, media_type=JSON_TYPE)
        record.stream = True
        # A client that wants progress gets its status with the first of it.
        progress = record.progress if parsed.returns_progress else None
        begun = None if progress is None else progress.changed
        frames = await commit(result, _PRELUDE, bounds.STREAM_COMMIT_S, begun)
        beat = PING if endpoint.anthropic else COMMENT
        return SseResponse(frames, record, engine.keep_alive_s, beat)

    async def handle(endpoint: Endpoint | None, request: Request) -> Response:
        """Answer a request; None for one of invocations, whose body names its endpoint."""
        record: RequestRecord = request.state.record
        record.deadline = get_deadline(request.headers, record.started, settings.max_request_s)
        try:
            raw = await read_body(request, settings)
            if endpoint is None:
                work = respond(*_invocation(raw, request, frontend().endpoints), request)
            else:
                work = respond(endpoint, raw, request)
            return await until_disconnect(request.receive, work, record.deadline)
        except (OverloadedError, QueueTimeoutError) as error:
            if "retry-after" not in error.headers:
                error.retry_in(admission.retry_after_s())
            raise

    for endpoint in Endpoint:
        handler = partial(handle, endpoint)
        app.add_route(endpoint.value, handler, methods=["POST"], name=endpoint.name.lower())
    app.add_route(INVOCATIONS, partial(handle, None), methods=["POST"], name="invocations")


def _invocation(
    raw: bytes, request: Request, offered: Collection[Endpoint]
) -> tuple[Endpoint, bytes]:
    """Return the endpoint of an invocation, by the names of its body's fields, and its body."""
    check_session(request.headers)
    try:
        names = decode(raw, dict[str, Raw])
    except JsonSyntaxError as error:
        raise InvalidJsonError(f"The request body is not valid JSON: {error}.") from None
    except ShapeError as error:
        raise InvalidJsonError(f"The request body must be a JSON object: {error}.") from None
    adapter = request.headers.get(ADAPTER_HEADER)
    fields = raw if adapter is None else with_fields(raw, {"model": adapter})
    return invoked_endpoint(names, offered), fields
