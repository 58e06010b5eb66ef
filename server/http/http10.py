"""Responses of HTTP/1.0, whose clients read neither chunks nor interim responses."""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def http10_app(app: Any, cycle: RequestResponseCycle) -> Any:
    """Return the ASGI application of a cycle: a body without a length ends with the connection."""
    cycle.waiting_for_100_continue = False

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_unchunked(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                has_length = b"content-length" in names
                if not has_length:
                    # Uvicorn sends chunks unless this is set.
                    cycle.chunked_encoding = cycle.keep_alive = False
                elif cycle.keep_alive and b"connection" not in names:
                    message["headers"] = [*message["headers"], (b"connection", b"keep-alive")]
            elif not has_length:
                # Uvicorn compares it with the body.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return respond
