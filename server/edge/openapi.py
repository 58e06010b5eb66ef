"""The OpenAPI document of what this server offers: vLLM's request models, and our own routes.

Every status that a route answers with is declared, errors with their codes and one envelope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from server import errors
from server.edge.openapi_operations import (
    ADMIN,
    DESCRIPTIONS,
    ERROR,
    EVENTS,
    INFERENCE_FAILURES,
    JSON,
    PAGES,
    PROBES,
    WORK,
    Operation,
)
from server.errors import TABLE, ServerError
from server.frontend import Endpoint, WireSchemas
from server.request.route_table import NEVER_GUARDED, Scope, route_of

_GATE_FAILURES = (errors.NotReadyError, errors.DrainingError, errors.EngineFailedError)
_ERROR_REF = {"$ref": "#/components/schemas/Error"}
_RETRY = {
    "Retry-After": {
        "description": "Seconds until another try is worth it; `retry-after-ms` has milliseconds.",
        "schema": {"type": "string"},
    }
}
_WORDS: Mapping[Endpoint, str] = {
    Endpoint.CHAT: "Answer a conversation.",
    Endpoint.COMPLETION: "Continue a text.",
    Endpoint.RESPONSES: "Answer as OpenAI's Responses API does; nothing is stored.",
    Endpoint.MESSAGES: "Answer as Anthropic's Messages API does.",
    Endpoint.COUNT_TOKENS: "Count the tokens of a conversation, Anthropic's form.",
    Endpoint.TOKENIZE: "Turn a text or a conversation into token ids.",
    Endpoint.DETOKENIZE: "Turn token ids into text.",
}


def openapi_document(
    schemas: WireSchemas, version: str, root_path: str, *, console: bool
) -> dict[str, Any]:
    """Return the document of a server with these endpoints, and with or without its console."""
    operations = [*PROBES, *PAGES, *DESCRIPTIONS, *WORK, *ADMIN]
    if not console:
        operations = [op for op in operations if route_of(op.path).scope is not Scope.PAGE]
    operations += [_inference(endpoint, schemas) for endpoint in schemas.requests]
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rbln-serve", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**schemas.definitions, "Error": ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _inference(endpoint: Endpoint, schemas: WireSchemas) -> Operation:
    return Operation(
        path=endpoint.value,
        method="post",
        summary=_WORDS.get(endpoint, "For models that pool."),
        body=schemas.requests[endpoint],
        answers={200: ("The answer.", schemas.answers[endpoint])},
        failures=INFERENCE_FAILURES,
        media_types=(JSON, EVENTS) if endpoint in schemas.streaming else (JSON,),
    )


def _described(operation: Operation) -> dict[str, Any]:
    route = route_of(operation.path)
    failures = [*operation.failures, errors.InternalError]
    if route.scope not in NEVER_GUARDED:
        failures.append(errors.AuthenticationError)
    if route.scope in (Scope.ADMIN, Scope.ADAPTERS):
        failures.append(errors.PermissionDeniedError)
    if route.gated:
        failures += _GATE_FAILURES
    responses = {**_failed(failures), **_succeeded(operation)}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}",
        "responses": {str(status): responses[status] for status in sorted(responses)},
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        required = bool(operation.body.get("required") or "$ref" in operation.body)
        content = {JSON: {"schema": operation.body}}
        described["requestBody"] = {"required": required, "content": content}
    if route.scope not in NEVER_GUARDED:
        described["security"] = [{"bearer": []}, {"x-api-key": []}, {}]
    return described


def _succeeded(operation: Operation) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for status, (words, schema) in operation.answers.items():
        found[status] = {"description": words}
        content: dict[str, dict[str, Any]] = {name: {} for name in operation.media_types}
        if content:
            found[status]["content"] = content
        if schema is not None:
            content[operation.media_types[0]]["schema"] = schema
    return found


def _failed(failures: Iterable[type[ServerError]]) -> dict[int, dict[str, Any]]:
    codes: dict[int, list[str]] = {}
    for failure in failures:
        row = TABLE[failure]
        listed = codes.setdefault(row.status, [])
        if row.code not in listed:
            listed.append(row.code)
    found: dict[int, dict[str, Any]] = {}
    for status, names in codes.items():
        words = ", ".join(f"`{name}`" for name in names)
        found[status] = {"description": words, "content": {JSON: {"schema": _ERROR_REF}}}
        if status in (429, 503):
            found[status]["headers"] = _RETRY
    return found
