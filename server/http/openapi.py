"""The OpenAPI document of our routes and of the endpoints of the served model.

A route declares its body, responses and errors; `DescribedRoute` adds the security schemes and
errors that all routes of its scope share.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from server import errors
from server.errors import ErrorEnvelope, NotReadyError, ServerError
from server.frontend import Frontend, WireSchemas
from server.lifecycle import Lifecycle
from server.request.body import JSON_TYPE
from server.request.endpoints import (
    INVOCATIONS,
    INVOKED,
    NEVER_GUARDED,
    Scope,
    get_route,
    get_scope,
)
from server.wire import Endpoint, JsonObject

BODY_FAILURES = (
    errors.InvalidJsonError,
    errors.InvalidTypeError,
    errors.InvalidValueError,
    errors.MissingFieldError,
    errors.UnknownFieldError,
    errors.UnsupportedOperationError,
    errors.MediaTypeError,
    errors.BodyTooLargeError,
    errors.BodyTimeoutError,
)
"""Errors of every request with a body."""
_GATE_FAILURES = (errors.NotReadyError, errors.DrainingError, errors.EngineFailedError)
_INFERENCE_FAILURES = (
    *BODY_FAILURES,
    errors.UnsupportedFieldError,
    errors.ContextLengthError,
    errors.InvalidSchemaError,
    errors.PermissionDeniedError,
    errors.InvalidGrammarError,
    errors.ModelNotFoundError,
    errors.OverloadedError,
    errors.NotTriedError,
    errors.QueueTimeoutError,
    errors.DeadlineError,
    *_GATE_FAILURES,
)
_REFERENCE = "#/components/schemas/{model}"
_RETRY = {
    "Retry-After": {
        "description": "Seconds until a retry may succeed; `retry-after-ms` has milliseconds.",
        "schema": {"type": "string"},
    }
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_SECURITY: JsonObject = {"security": [*({name: []} for name in _KEYS), {}]}
_SUMMARIES: Mapping[Endpoint, str] = {
    Endpoint.CHAT: "Answer a conversation.",
    Endpoint.COMPLETION: "Continue a text.",
    Endpoint.RESPONSES: "Answer as OpenAI's Responses API does; stored with --data-dir.",
    Endpoint.INPUT_TOKENS: "Count the tokens of the prompt that a response would have.",
    Endpoint.COMPACT: "Return a shorter conversation that can be continued.",
    Endpoint.MESSAGES: "Answer as Anthropic's Messages API does.",
    Endpoint.COUNT_TOKENS: "Count the tokens of a conversation, Anthropic's form.",
    Endpoint.RENDER_CHAT: "Return the token ids and the sampling parameters of a conversation.",
    Endpoint.RENDER_COMPLETION: "Return the token ids and the sampling parameters of each prompt.",
    Endpoint.TOKENIZE: "Turn a text or a conversation into token ids.",
    Endpoint.DETOKENIZE: "Turn token ids into text.",
}


def failing(*failures: type[ServerError]) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` for the errors of a route."""
    codes: dict[int | str, list[str]] = {}
    for failure in failures:
        codes.setdefault(failure.status, []).append(f"`{failure.code}`")
    schema = {"$ref": _REFERENCE.format(model=ErrorEnvelope.__name__)}
    return {
        status: {"description": ", ".join(names), "content": {JSON_TYPE: {"schema": schema}}}
        | ({"headers": _RETRY} if status in (429, 503) else {})
        for status, names in codes.items()
    }


def taking(schema: JsonObject, *, required: bool = True) -> dict[str, Any]:
    """Return FastAPI's `openapi_extra` for a route that reads its JSON body itself."""
    return {"requestBody": {"required": required, "content": {JSON_TYPE: {"schema": schema}}}}


class DescribedRoute(APIRoute):
    """A route of one method, documented by its handler's docstring, its types and its scope."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        route, (method,) = get_route(path), options["methods"]
        scope = get_scope(route, method)
        common: list[type[ServerError]] = [errors.InternalError]
        if scope not in NEVER_GUARDED:
            common.append(errors.AuthenticationError)
            options["openapi_extra"] = (options.get("openapi_extra") or {}) | _SECURITY
        if scope in (Scope.ADMIN, Scope.ADAPTERS):
            common.append(errors.PermissionDeniedError)
        if route.needs_ready:
            common += _GATE_FAILURES
        options["responses"] = failing(*common) | (options.get("responses") or {})
        options["operation_id"] = f"{method.lower()}{route.template}"
        super().__init__(path, endpoint, **options)
        self.summary, self.description = self.summary or self.description, ""

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        return super().matches(_as_get(scope))

    async def handle(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a request; the connection omits the body of a `HEAD` response."""
        await super().handle(_as_get(scope), receive, send)


def _as_get(scope: AsgiScope) -> AsgiScope:
    return {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope


def openapi_document(
    routes: Sequence[BaseRoute], engine: WireSchemas, version: str, root_path: str
) -> JsonObject:
    document = get_openapi(
        title="rbln-serve",
        version=version,
        servers=[{"url": root_path or "/"}],
        routes=[*routes, *_inference_routes(engine)],
    )
    for path in document["paths"].values():
        for operation in path.values():
            # The handlers check parameters and raise our errors.
            operation["responses"].pop("422", None)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    envelope: Any = [("error", "serialization", TypeAdapter(ErrorEnvelope))]
    error_schemas = TypeAdapter.json_schemas(envelope, ref_template=_REFERENCE)[1]["$defs"]
    document["components"]["schemas"] = {**schemas, **error_schemas, **engine.definitions}
    document["components"]["securitySchemes"] = _KEYS
    return document


def _inference(
    path: str,
    summary: str,
    request: JsonObject,
    answer: JsonObject,
    *failures: type[ServerError],
    streams: bool,
) -> DescribedRoute:
    """Return a route for the document only; the served one exists before the engine does."""
    content: JsonObject = {JSON_TYPE: {"schema": answer}}
    if streams:
        content["text/event-stream"] = {}
    return DescribedRoute(
        path,
        lambda: None,
        methods=["POST"],
        summary=summary,
        response_class=Response,
        response_description="The answer.",
        responses={200: {"content": content}, **failing(*_INFERENCE_FAILURES, *failures)},
        openapi_extra=taking(request),
    )


def _inference_routes(engine: WireSchemas) -> Iterator[DescribedRoute]:
    for endpoint, request in engine.requests.items():
        yield _inference(
            endpoint.value,
            _SUMMARIES.get(endpoint, "For models that pool."),
            request,
            engine.answers[endpoint],
            *((errors.StorageFullError,) if endpoint is Endpoint.RESPONSES else ()),
            streams=endpoint in engine.streaming,
        )
    invoked = [endpoint for endpoint in INVOKED if endpoint in engine.requests]
    yield _inference(
        INVOCATIONS,
        "Answer as the endpoint that the body's fields name; for hosts such as SageMaker.",
        {"anyOf": [engine.requests[endpoint] for endpoint in invoked]},
        {"anyOf": [engine.answers[endpoint] for endpoint in invoked]},
        streams=any(endpoint in engine.streaming for endpoint in invoked),
    )


def openapi_router(
    lifecycle: Lifecycle, frontend: Callable[[], Frontend], version: str, root_path: str
) -> APIRouter:
    """Return the route; the document exists once the engine has started."""
    router = APIRouter(route_class=DescribedRoute)
    written: list[bytes] = []

    def write(routes: Sequence[BaseRoute]) -> bytes:
        schemas = frontend().schemas()
        return json.dumps(openapi_document(routes, schemas, version, root_path)).encode()

    @router.get("/openapi.json", response_model=JsonObject, responses=failing(NotReadyError))
    async def document(request: Request) -> Response:
        """Return the OpenAPI document."""
        if not lifecycle.started:
            lifecycle.check_ready()
        if not written:
            # Takes about a second, so it runs in a thread.
            written.append(await asyncio.to_thread(write, request.app.routes))
        return Response(written[0], media_type="application/json")

    return router
