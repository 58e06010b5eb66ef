"""Middlewares of every request: id, log line, metrics, span; access, readiness, errors; CORS.

Pure ASGI: Starlette's BaseHTTPMiddleware hides a client's disconnect from the handler, so that a
request would not be aborted. Invariants: every response carries X-Request-Id; a request for the
engine is refused unless the service is ready; each request is counted once, with bounded labels.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.admission import Admission, rate_headers
from server.errors import (
    ContentEncodingError,
    InternalError,
    OriginError,
    OverloadedError,
    RateLimitError,
    ServerError,
    describe,
)
from server.frontend import Frontend
from server.http.auth import Access
from server.lifecycle import Lifecycle, ServicePhase
from server.observability.logging import FIELDS, REQUEST_LOGGER, request_id_var
from server.observability.metrics import ServerMetrics
from server.observability.tracing import (
    CACHE_READ_TOKENS,
    INPUT_TOKENS,
    MAX_TEXT,
    OPERATIONS_BY_PATH,
    OUTPUT_TOKENS,
    AttributeValue,
    Tracing,
    operation_attributes,
)
from server.request.body import CLIENT_GONE
from server.request.endpoints import INVOCATIONS, OTHER, get_route, is_anthropic, route_path
from server.request.endpoints import Scope as KeyScope
from server.request.record import (
    ANTHROPIC_ID_HEADER,
    INTERNAL,
    REQUEST_ID_HEADER,
    Caller,
    InternalRequest,
    RequestRecord,
    get_record,
    get_request_id,
    record_var,
)
from server.settings import ServerSettings
from server.wire import Endpoint, named_frame

logger = logging.getLogger(REQUEST_LOGGER)

_REFUSALS = (OverloadedError, RateLimitError)
"""Errors of requests that do not count in the rate of their key."""
# Polled routes, logged at debug level.
_QUIET = (KeyScope.PROBE, KeyScope.PAGE, KeyScope.METRICS)


class RequestMiddleware:
    """The outermost layer: request ids, and one log line, count and span per request."""

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: Lifecycle,
        metrics: ServerMetrics,
        frontend: Callable[[], Frontend],
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of scope pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        route = get_route(path)
        if path[-1:] == "/" and path[-2:] not in ("/", "//"):
            # A redirect would lose the body of a POST.
            without_slash = get_route(path[:-1])
            if without_slash is not OTHER:
                route, scope["path"] = without_slash, scope["path"][:-1]
        request_id = get_request_id(scope["headers"])
        id_header = (REQUEST_ID_HEADER, request_id.encode("ascii"))
        # With exactly this id, for handlers that read it from there.
        headers = [one for one in scope["headers"] if one[0] != REQUEST_ID_HEADER]
        scope["headers"] = [*headers, id_header]
        state = scope.setdefault("state", {})
        record = state["record"] = RequestRecord(
            route,
            scope["method"],
            time.perf_counter(),
            request_id,
            is_anthropic(route, path, headers),
            state.get(INTERNAL),
        )
        ids = [id_header]
        if record.anthropic:
            ids.append((ANTHROPIC_ID_HEADER, id_header[1]))
        # The task serves this request alone.
        request_id_var.set(request_id)
        record_var.set(record)
        tracing = None
        if route.needs_ready and self._lifecycle.ready_after_s is not None:
            tracing = self._frontend().tracing
        if tracing is not None:
            begin_span(tracing, scope, record, request_id)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), *ids]
                headers += [(k.encode(), v.encode()) for k, v in record.answer_headers.items()]
                if record.key_use is not None:
                    shown = rate_headers(record.key_use.rates(), anthropic=record.anthropic)
                    headers += [(k.encode(), v.encode()) for k, v in shown.items()]
                if self._lifecycle.phase >= ServicePhase.DRAINING:
                    # Makes clients reconnect, to another server.
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            else:
                record.sent_bytes += len(message.get("body", b""))
                record.complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            # A stack runs every callback, last in first out, even if one of them raises.
            with ExitStack() as ending:
                # The counts refer to the engine's request state, which must be freed.
                ending.callback(record.tokens.close)
                if tracing is not None:
                    ending.callback(end_span, tracing, record)
                ending.callback(self._finish, record)
                for end in reversed(record.on_end):
                    ending.callback(end)

    def _finish(self, record: RequestRecord) -> None:
        metrics = self._metrics
        seconds = time.perf_counter() - record.started
        outcome = record.final_outcome()
        code = record.status or CLIENT_GONE
        route = record.route.template
        # Internal requests are no HTTP requests and do not count in their metrics.
        if record.internal is None:
            method = record.method if record.method in METHODS else "other"
            metrics.count("rbln_http_requests_total", route, method, str(code), outcome)
            stream = "true" if record.stream else "false"
            metrics.observe("rbln_http_request_seconds", seconds, route, stream)
            if record.tier is not None:
                metrics.count("rbln_tier_requests_total", record.tier.value, outcome)
        if record.guide is not None:
            metrics.count("rbln_structured_output_requests_total", record.guide, outcome)
        prompt, completion = record.tokens.total()
        key, error = record.caller.key, record.error
        if error is not None and error.rejection is not None:
            metrics.count("rbln_admission_rejections_total", error.rejection)
            if isinstance(error, RateLimitError) and key is not None:
                limit = error.rejection.removeprefix("key_")
                metrics.count("rbln_key_rejections_total", key, limit)
        if key is not None:
            metrics.count("rbln_key_requests_total", key, outcome)
            if prompt or completion:
                metrics.count("rbln_key_tokens_total", key, "prompt", by=prompt)
                metrics.count("rbln_key_tokens_total", key, "completion", by=completion)
        quiet = record.route.scope in _QUIET or record.internal is not None
        level = logging.DEBUG if quiet else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields = {
            "method": record.method,
            "route": route,
            "code": code,
            "outcome": outcome,
            "seconds": round(seconds, 6),
            "stream": record.stream,
            "bytes": record.sent_bytes,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "key": key,
        }
        logger.log(
            level,
            "%s %s %d %s %.3f s",
            record.method,
            route,
            code,
            outcome,
            seconds,
            extra={FIELDS: fields},
        )


class AccessMiddleware:
    """Checks access, readiness and admission, and turns exceptions into error responses."""

    def __init__(
        self, app: ASGIApp, lifecycle: Lifecycle, admission: Admission, access: Access
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._access = access
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of scope pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record: RequestRecord = scope["state"]["record"]
        try:
            if record.internal is None:
                record.caller = self._access.admit(record.route, scope)
            else:
                self._admit_internal(record, record.internal)
            for name, value in scope["headers"]:
                if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                    raise ContentEncodingError(
                        f"The Content-Encoding {describe(value.decode('latin-1'))} is not "
                        "supported; send the body as it is.",
                        # RFC 9110: the content codings that are accepted.
                        headers={"accept-encoding": "identity"},
                    )
            if not record.route.needs_ready:
                await self._app(scope, receive, send)
                return
            self._lifecycle.check_ready()
            if record.route.admitted and record.internal is None:
                # Before the body is read: most of an overload is rejected here.
                self._admission.check(record.caller.owner)
                if record.caller.key is not None:
                    self._use_key(record, record.caller.key)
            with self._lifecycle.track():
                await self._app(scope, receive, send)
        except ServerError as error:
            if record.key_use is not None and isinstance(error, _REFUSALS):
                record.key_use.refund()
            await send_error(error, send, record)
        except Exception:
            # The boundary of a request: an error must not end the process.
            logger.exception("%s %s failed", record.method, record.route.template)
            await send_error(InternalError("Internal error."), send, record)

    def _admit_internal(self, record: RequestRecord, internal: InternalRequest) -> None:
        """Let a request of the service itself pass as one of its owner."""
        owner, limits = internal.owner, self._access.get_limits(internal.owner)
        record.caller = Caller(
            self._access.get_key_name(owner), False, internal.tiers, owner, limits
        )
        if internal.permitted:
            # The request that made it was checked.
            record.on_end.append(
                lambda: self._admission.keys.charge(owner, limits, sum(record.tokens.total()))
            )

    def _use_key(self, record: RequestRecord, key: str) -> None:
        """Take a request of the caller's key. Raises `RateLimitError`."""
        caller = record.caller
        use = record.key_use = self._admission.keys.use(caller.owner, key, caller.limits)
        try:
            use.enter(caller.limits.max_in_flight)
        except RateLimitError as error:
            if error.rejection == "key_in_flight":
                # It depends on the answers that run, so it is an estimate.
                error.retry_in(self._admission.retry_after_s())
            raise
        record.on_end.append(lambda: use.end(sum(record.tokens.total())))


# Errors, as a response or as the last frame of a stream that has begun.

# Streams of /invocations are chats or completions, whose error frames are equal.
_ENDPOINTS = {INVOCATIONS: Endpoint.CHAT} | {endpoint.value: endpoint for endpoint in Endpoint}
_MAX_SEND_S = 0.5


async def send_error(error: ServerError, send: Send, record: RequestRecord) -> None:
    """Send the error in the endpoint's format, unless the response is complete; set the outcome."""
    if record.complete:
        return
    record.note(error)
    endpoint = _ENDPOINTS.get(record.route.template)
    if not record.status:
        body = error.anthropic_body(record.request_id) if record.anthropic else error.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(k.encode(), v.encode()) for k, v in error.headers.items()]
        start = {"type": "http.response.start", "status": error.status, "headers": headers}
        await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": False})
    elif record.stream and endpoint is not None:
        make = record.failure_frames
        frames = error_frame(error, endpoint, record) if make is None else make(error)
        # A client that stopped reading must not hold the connection.
        with suppress(TimeoutError):
            async with asyncio.timeout(_MAX_SEND_S):
                last = {"type": "http.response.body", "body": frames.encode(), "more_body": False}
                await send(last)


def error_frame(error: ServerError, endpoint: Endpoint, record: RequestRecord) -> str:
    """Return the SSE frames that end a failed stream, in the endpoint's format."""
    if endpoint is Endpoint.RESPONSES:
        return named_frame("error", json.dumps(error.response_event(record.sent_frames)))
    if endpoint.anthropic:
        return named_frame("error", error.anthropic_body(record.request_id))
    return f"data: {error.body().decode()}\n\ndata: [DONE]\n\n"


# The span of a request: HTTP attributes at its start, outcome and tokens at its end.

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
"""The methods that metrics and spans name; others share one label."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


def begin_span(tracing: Tracing, scope: Scope, record: RequestRecord, request_id: str) -> None:
    """Start the span of a request and give its context to the engine's spans."""
    remote = record.internal is None
    attributes: dict[str, AttributeValue] = {"http.request.header.x-request-id": [request_id]}
    if remote:
        attributes |= _http_attributes(scope, record)
    operation = OPERATIONS_BY_PATH.get(record.route.template)
    if operation is not None:
        attributes |= operation_attributes(operation)
    method = record.method if record.method in METHODS else "HTTP"
    name = operation or f"{method} {record.route.template}"
    record.span = tracing.begin(name, scope["headers"], attributes, remote=remote)
    record.trace_headers = tracing.get_trace_context(record.span)


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
    attributes: dict[str, AttributeValue] = {
        "http.request.method": record.method if known else "_OTHER",
        "http.route": record.route.template,
        "url.path": scope["path"][:MAX_TEXT],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if not known:
        attributes["http.request.method_original"] = record.method[:MAX_TEXT]
    headers = dict(scope["headers"])
    if (agent := headers.get(b"user-agent")) is not None:
        attributes["user_agent.original"] = agent.decode("latin-1")[:MAX_TEXT]
    return attributes | _server_attributes(scope, headers.get(b"host", b"").decode("latin-1"))


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


# Pages of other origins: the CORS headers.


class OriginsMiddleware(CORSMiddleware):
    """Starlette's middleware, which refuses a preflight request with the error envelope."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            await super().__call__(scope, receive, send)
        except ServerError as error:
            await send_error(error, send, get_record(scope))

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the response of an allowed preflight request. Raises `OriginError`."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        failed = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        headers = {k: v for k, v in response.headers.items() if not k.startswith("content-")}
        raise OriginError(
            f"The preflight request of this page is refused for its: {failed} (--allowed-origins, "
            "--allowed-methods, --allowed-headers).",
            headers=headers,
        )


def allow_origins(app: FastAPI, settings: ServerSettings) -> None:
    """Allow pages of other origins to call the API and read the gate's errors."""
    if not settings.allowed_origins:
        return
    app.add_middleware(
        OriginsMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=("x-request-id", "request-id", "retry-after", "retry-after-ms"),
    )
