"""What happens around every request: its id, the lifecycle gate, its outcome.

Pure ASGI on purpose: Starlette's BaseHTTPMiddleware hides a client's disconnect from the
handler, and then a request is not aborted. Invariants: every answer carries X-Request-Id; a
request for the engine is refused unless the service is ready; each request is counted exactly
once, with a bounded set of labels.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import InternalError, ServerError
from server.frontend import Endpoint
from server.lifecycle import Lifecycle
from server.observability.logging import request_id_var
from server.observability.metrics import ServerMetrics
from server.request_id import HEADER, request_id_of, with_request_id

logger = logging.getLogger(__name__)

PROBES = frozenset({"/livez", "/readyz", "/startupz", "/health", "/metrics", "/version"})
SERVER_INFO = "/v1/server_info"
# What answers in every phase of the service's life.
_UNGATED = PROBES | {SERVER_INFO, "other"}
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_MODELS = "/v1/models"
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
_CLIENT_GONE = 499


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request when it ends; handlers find it in `request.state.record`."""

    route: str
    method: str
    started: float
    stream: bool = False
    status: int = 0
    outcome: str | None = None

    def final_outcome(self) -> str:
        """Return the outcome that a handler gave, else what the status says."""
        if self.outcome is not None:
            return self.outcome
        if not self.status:
            return "aborted"
        if self.status == 503:
            return "rejected"
        if self.status >= 500:
            return "server_error"
        return "client_error" if self.status >= 400 else "ok"


def route_of(path: str) -> str:
    """Return the path's template for labels; unknown paths share one."""
    if path in PROBES or path in _ENDPOINTS or path in (_MODELS, SERVER_INFO):
        return path
    return f"{_MODELS}/{{model}}" if path.startswith(f"{_MODELS}/") else "other"


class EdgeMiddleware:
    """The outermost layer of ours."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, metrics: ServerMetrics) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of scope pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        scope["headers"] = with_request_id(scope["headers"], request_id)
        token = request_id_var.set(request_id)
        route = route_of(scope["path"])
        record = RequestRecord(route, scope["method"], time.perf_counter())
        scope.setdefault("state", {})["record"] = record
        try:
            await self._serve(scope, receive, self._stamped(send, record, request_id), record)
        finally:
            self._finish(record)
            request_id_var.reset(token)

    def _stamped(self, send: Send, record: RequestRecord, request_id: str) -> Send:
        """Return a `send` that notes the status and adds our headers."""

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), (HEADER, request_id.encode("ascii"))]
                if not self._lifecycle.accepting and record.route not in PROBES:
                    # Clients should come back over a new connection, to another server.
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        return stamped

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        gated = record.route not in _UNGATED
        refusal = self._lifecycle.refusal() if gated else None
        if refusal is not None:
            await send_error(refusal, scope, send, record)
            return
        try:
            if gated:
                with self._lifecycle.track():
                    await self._app(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except ServerError as error:
            record.outcome = error.row.outcome
            if not record.status:
                await send_error(error, scope, send, record)
        except Exception:
            # The boundary of a request: a fault here must not take the process down.
            logger.exception("%s %s failed", record.method, record.route)
            record.outcome = "server_error"
            if not record.status:
                await send_error(InternalError("Internal error."), scope, send, record)

    def _finish(self, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.started
        outcome = record.final_outcome()
        code = record.status or _CLIENT_GONE
        self._metrics.observe_request(
            route=record.route,
            method=record.method if record.method in _METHODS else "other",
            code=code,
            outcome=outcome,
            stream=record.stream,
            seconds=seconds,
        )
        level = logging.DEBUG if record.route in PROBES else logging.INFO
        logger.log(level, "%s %s %d %s %.3f s", record.method, record.route, code, outcome, seconds)


async def send_error(error: ServerError, scope: Scope, send: Send, record: RequestRecord) -> None:
    """Answer with the error's status and envelope, and note its outcome."""
    record.outcome = error.row.outcome
    endpoint = _ENDPOINTS.get(scope["path"])
    body = error.body(anthropic=endpoint is not None and endpoint.anthropic)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(k.encode(), v.encode()) for k, v in error.headers.items()]
    status = error.row.status
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
