"""The front process's middleware: request id, key, readiness, errors as envelopes, counts.

Requests that a model's process answers are logged and counted there; the others here.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import InternalError, ServerError
from server.http.auth import Access
from server.http.error_responses import send_error
from server.http.middleware import begin_record
from server.http.spans import METHODS
from server.lifecycle import Lifecycle
from server.model_pool.front.routes import front_route_of
from server.observability.logging import FIELDS, REQUEST_LOGGER
from server.observability.metrics import ServerMetrics
from server.request.body import CLIENT_GONE, ClientGoneError
from server.request.record import RequestRecord
from server.request.request_id import ANTHROPIC_HEADER, HEADER
from server.request.route_table import Scope as KeyScope
from server.request.route_table import route_path

logger = logging.getLogger(REQUEST_LOGGER)

FORWARDED = "forwarded"
"""Key of the state of an ASGI scope: True once the request was sent to a model's process."""
_QUIET = (KeyScope.PROBE, KeyScope.PAGE, KeyScope.METRICS)


class FrontMiddleware:
    """Every request passes it."""

    def __init__(
        self, app: ASGIApp, lifecycle: Lifecycle, access: Access, metrics: ServerMetrics
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of scope pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin_record(scope, front_route_of(route_path(scope)))
        sends = _recorded(send, record)
        try:
            await self._pass(record, scope, receive, sends)
        except ServerError as error:
            await send_error(error, sends, record)
        except ClientGoneError:
            record.outcome = "aborted"
        except Exception:
            # The boundary of a request: an error must not end the process.
            logger.exception("%s %s failed", record.method, record.route.template)
            await send_error(InternalError("Internal error."), sends, record)
        finally:
            if record.error is not None or not scope["state"].get(FORWARDED):
                self._finish(record)

    async def _pass(
        self, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record.caller = self._access.admit(record.route, scope)
        if record.route.scope in (KeyScope.PROBE, KeyScope.PAGE, KeyScope.METRICS, KeyScope.ADMIN):
            await self._app(scope, receive, send)
            return
        if (refusal := self._lifecycle.refusal()) is not None:
            raise refusal
        with self._lifecycle.track():
            await self._app(scope, receive, send)

    def _finish(self, record: RequestRecord) -> None:
        """Log and count a request that was answered here."""
        seconds = time.perf_counter() - record.started
        outcome, code = record.final_outcome(), record.status or CLIENT_GONE
        route = record.route.template
        self._metrics.observe_request(
            route=route,
            method=record.method if record.method in METHODS else "other",
            code=code,
            outcome=outcome,
            stream=record.stream,
            seconds=seconds,
        )
        level = logging.DEBUG if record.route.scope in _QUIET else logging.INFO
        if logger.isEnabledFor(level):
            fields = {
                "method": record.method,
                "route": route,
                "code": code,
                "outcome": outcome,
                "seconds": round(seconds, 6),
                "key": record.caller.key,
            }
            logger.log(
                level,
                "%s %s %d %s %.3f s",
                *(record.method, route, code, outcome, seconds),
                extra={FIELDS: fields},
            )


def _recorded(send: Send, record: RequestRecord) -> Send:
    """Return a `send` that records the status and adds the request id."""
    names = (HEADER, ANTHROPIC_HEADER) if record.anthropic else (HEADER,)

    async def send_recorded(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            given = {name for name, _ in message.get("headers", ())}
            ids = [(n, record.request_id.encode("ascii")) for n in names if n not in given]
            message["headers"] = [*message.get("headers", ()), *ids]
        else:
            record.complete = not message.get("more_body", False)
        await send(message)

    return send_recorded
