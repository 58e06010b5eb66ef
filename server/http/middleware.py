"""Middlewares of every request: request id, log line, metrics, span, access and readiness.

Pure ASGI: Starlette's BaseHTTPMiddleware hides a client's disconnect from the handler, so that a
request would not be aborted. Invariants: every response carries X-Request-Id; a request for the
engine is refused unless the service is ready; each request is counted once, with bounded labels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.admission import Admission
from server.errors import (
    ContentEncodingError,
    InternalError,
    OverloadedError,
    RateLimitError,
    ServerError,
    describe,
)
from server.http.auth import Access
from server.http.error_responses import send_error
from server.http.spans import METHODS, begin_span, end_span
from server.key_limits.headers import rate_headers
from server.lifecycle import Lifecycle
from server.observability.logging import FIELDS, REQUEST_LOGGER, request_id_var
from server.observability.metrics import ServerMetrics
from server.request.body import CLIENT_GONE
from server.request.endpoints import Scope as KeyScope
from server.request.endpoints import is_anthropic, route_of, route_path, without_last_slash
from server.request.record import (
    ANTHROPIC_ID_HEADER,
    INTERNAL,
    REQUEST_ID_HEADER,
    Caller,
    RequestRecord,
    record_of,
    record_var,
    request_id_of,
    with_request_id,
)

if TYPE_CHECKING:
    from server.observability.tracing import Tracing

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
        tracing: Callable[[], Tracing | None],
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of scope pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (shorter := without_last_slash(scope)) is not None:
            # A redirect would lose the body of a POST.
            scope["path"] = shorter
        request_id = request_id_of(scope["headers"])
        scope["headers"] = with_request_id(scope["headers"], request_id)
        state = scope.setdefault("state", {})
        route = route_of(route_path(scope))
        record = state["record"] = RequestRecord(
            route,
            scope["method"],
            time.perf_counter(),
            request_id,
            is_anthropic(route, scope),
            state.get(INTERNAL),
        )
        # The task serves this request alone.
        request_id_var.set(request_id)
        record_var.set(record)
        tracing = self._tracing() if record.route.gated else None
        if tracing is not None:
            begin_span(tracing, scope, record, request_id)
        try:
            await self._app(scope, receive, self._with_headers(send, record))
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

    def _with_headers(self, send: Send, record: RequestRecord) -> Send:
        """Return a `send` that records the status and adds our headers."""
        names = (
            (REQUEST_ID_HEADER, ANTHROPIC_ID_HEADER) if record.anthropic else (REQUEST_ID_HEADER,)
        )
        ids = [(name, record.request_id.encode("ascii")) for name in names]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), *ids]
                headers += [(k.encode(), v.encode()) for k, v in record.answer_headers.items()]
                if record.key_use is not None:
                    shown = rate_headers(record.key_use.rates(), anthropic=record.anthropic)
                    headers += [(k.encode(), v.encode()) for k, v in shown.items()]
                if not self._lifecycle.accepting:
                    # Makes clients reconnect, to another server.
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            else:
                record.sent_bytes += len(message.get("body", b""))
                record.complete = not message.get("more_body", False)
            await send(message)

        return send_with_headers

    def _finish(self, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.started
        outcome = record.final_outcome()
        code = record.status or CLIENT_GONE
        route = record.route.template
        # Internal requests are no HTTP requests and do not count in their metrics.
        if record.internal is None:
            self._metrics.observe_request(
                route=route,
                method=record.method if record.method in METHODS else "other",
                code=code,
                outcome=outcome,
                stream=record.stream,
                seconds=seconds,
            )
            if record.tier is not None:
                self._metrics.observe_tier(record.tier.value, outcome)
        if record.guide is not None:
            self._metrics.observe_guided(record.guide, outcome)
        if record.error is not None and record.error.rejection is not None:
            self._metrics.observe_rejection(record.error.rejection)
            if isinstance(record.error, RateLimitError) and record.caller.key is not None:
                limit = record.error.rejection.removeprefix("key_")
                self._metrics.observe_key_rejection(record.caller.key, limit)
        prompt, completion = record.tokens.total()
        if record.caller.key is not None:
            self._metrics.observe_key(record.caller.key, outcome, prompt, completion)
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
            "key": record.caller.key,
        }
        logger.log(
            level,
            "%s %s %d %s %.3f s",
            *(record.method, route, code, outcome, seconds),
            extra={FIELDS: fields},
        )


class GateMiddleware:
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
        record = record_of(scope)
        try:
            await self._pass(record, scope, receive, send)
        except ServerError as error:
            if record.key_use is not None and isinstance(error, _REFUSALS):
                record.key_use.forgive()
            await send_error(error, send, record)
        except Exception:
            # The boundary of a request: an error must not end the process.
            logger.exception("%s %s failed", record.method, record.route.template)
            await send_error(InternalError("Internal error."), send, record)

    async def _pass(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if record.internal is not None:
            owner, tiers = record.internal.owner, record.internal.tiers
            limits = self._access.limits_of(owner)
            record.caller = Caller(self._access.name_of(owner), False, tiers, owner, limits)
            if record.internal.permitted:
                # The request that made it was checked.
                record.on_end.append(
                    lambda: self._admission.keys.charge(owner, limits, sum(record.tokens.total()))
                )
        else:
            record.caller = self._access.admit(record.route, scope)
        _check_encoding(scope)
        if not record.route.gated:
            await self._app(scope, receive, send)
            return
        if (refusal := self._lifecycle.refusal()) is not None:
            raise refusal
        if record.route.admitted and record.internal is None:
            # Before the body is read: most of an overload is rejected here.
            self._admission.check(record.caller.owner)
            self._use_key(record)
        with self._lifecycle.track():
            await self._app(scope, receive, send)

    def _use_key(self, record: RequestRecord) -> None:
        """Take a request of the caller's key. Raises `RateLimitError`."""
        caller = record.caller
        if caller.key is None:
            return
        use = record.key_use = self._admission.keys.use(caller.owner, caller.key, caller.limits)
        try:
            use.enter(caller.limits.max_in_flight)
        except RateLimitError as error:
            if error.rejection == "key_in_flight":
                # No time is exact: one of its answers must end.
                error.retry_in(self._admission.retry_after_s())
            raise
        record.on_end.append(lambda: use.end(sum(record.tokens.total())))


def _check_encoding(scope: Scope) -> None:
    """Raise `ContentEncodingError` for a compressed body."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise ContentEncodingError(
                f"The Content-Encoding {describe(value.decode('latin-1'))} is not supported; send "
                "the body as it is.",
                # RFC 9110: the content codings that are accepted.
                headers={"accept-encoding": "identity"},
            )
