"""The span of one request: HTTP attributes at its start, outcome and tokens at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import Scope

from server.observability.genai import (
    CACHE_READ_TOKENS,
    INPUT_TOKENS,
    MAX_TEXT,
    OUTPUT_TOKENS,
    AttributeValue,
    operation_attributes,
    operation_of,
)
from server.request.record import RequestRecord

if TYPE_CHECKING:
    from server.observability.tracing import Tracing

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
"""The methods that metrics and spans name; others share one label."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


def begin_span(tracing: Tracing, scope: Scope, record: RequestRecord, request_id: str) -> None:
    """Start the span of a request and give its context to the engine's spans."""
    remote = record.internal is None
    attributes: dict[str, AttributeValue] = {"http.request.header.x-request-id": [request_id]}
    if remote:
        attributes |= _http_attributes(scope, record)
    operation = operation_of(record.route.template)
    if operation is not None:
        attributes |= operation_attributes(operation)
    method = record.method if record.method in METHODS else "HTTP"
    name = operation or f"{method} {record.route.template}"
    record.span = tracing.begin(name, scope["headers"], attributes, remote=remote)
    record.trace_headers = tracing.context_of(record.span)


def end_span(tracing: Tracing, record: RequestRecord) -> None:
    """End the span of a request with the tokens that the engine has processed so far."""
    span, record.span = record.span, None
    if span is None:
        return
    outcome = record.final_outcome()
    attributes: dict[str, AttributeValue] = {"rbln_serve.outcome": outcome}
    if record.tokens.used:
        prompt, completion = record.tokens.total()
        attributes |= {INPUT_TOKENS: prompt, OUTPUT_TOKENS: completion}
        attributes[CACHE_READ_TOKENS] = record.tokens.of_prefix()[0]
    if record.caller.key is not None:
        attributes["rbln_serve.key"] = record.caller.key
    if record.status and record.internal is None:
        attributes["http.response.status_code"] = record.status
    # The status of the error: a stream that failed has already sent 200.
    status = record.status if record.error is None else record.error.status
    if record.error is not None:
        attributes["error.type"] = record.error.code
    elif outcome == "aborted":
        attributes["error.type"] = outcome
    elif status >= 400:
        attributes["error.type"] = str(status)
    tracing.end(span, attributes, failed=status >= 500)


def _http_attributes(scope: Scope, record: RequestRecord) -> dict[str, AttributeValue]:
    known = record.method in METHODS
    found: dict[str, AttributeValue] = {
        "http.request.method": record.method if known else "_OTHER",
        "http.route": record.route.template,
        "url.path": scope["path"][:MAX_TEXT],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if not known:
        found["http.request.method_original"] = record.method[:MAX_TEXT]
    headers = dict(scope["headers"])
    if (agent := headers.get(b"user-agent")) is not None:
        found["user_agent.original"] = agent.decode("latin-1")[:MAX_TEXT]
    return found | _server_attributes(scope, headers.get(b"host", b"").decode("latin-1"))


def _server_attributes(scope: Scope, host: str) -> dict[str, AttributeValue]:
    """Return the address in the Host header, else the socket's."""
    try:
        named = urlsplit(f"//{host}")
        address, port = named.hostname, named.port
    except ValueError:
        address, port = None, None
    if not address and scope.get("server"):
        address, port = scope["server"]
    if not address:
        return {}
    port = port or _DEFAULT_PORTS.get(scope["scheme"], 0)
    return {"server.address": address[:MAX_TEXT], "server.port": port}
