"""What is to happen at a request's end happens, whatever else fails there."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.http.middleware import RequestMiddleware
from server.lifecycle import Lifecycle
from server.observability.metrics import ServerMetrics
from server.request.record import record_of


async def test_an_end_that_fails_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    ended: list[str] = []

    def fail() -> None:
        ended.append("first")
        raise RuntimeError("broken")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).on_end += [fail, lambda: ended.append("second")]

    async def nothing(*_: Message) -> Message:
        return {"type": "http.disconnect"}

    metrics = ServerMetrics(tmp_path)
    edge = RequestMiddleware(app, Lifecycle(0.0), metrics, lambda: None)
    scope: Scope = {"type": "http", "path": "/livez", "method": "GET", "headers": []}
    with pytest.raises(RuntimeError, match="broken"):
        await edge(scope, nothing, nothing)
    assert ended == ["first", "second"]
    assert b'rbln_http_requests_total{code="499",method="GET",outcome="aborted"' in metrics.render()
