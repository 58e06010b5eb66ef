"""A server of chat completions with scripted events, on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class ChatServer:
    """Answers with the number of messages received, or with `status`; records requests."""

    status: int = 200
    deltas: tuple[dict[str, str], ...] | None = None
    failing: bool = False
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[ChatServer]:
        """Serve until the end of the context."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of one answer."""
        default = ({"role": "assistant", "content": ""}, {"content": "heard "})
        deltas = self.deltas or (*default, {"content": str(len(body["messages"]))})
        for delta in deltas:
            yield {"choices": [{"index": 0, "delta": delta}]}
        if self.failing:
            yield {"error": {"message": "the engine failed", "code": 500}}
        yield {"choices": [], "usage": {"completion_tokens": 2}}

    def _handler(scripted) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                scripted.bodies.append(body)
                scripted.keys.append(self.headers["authorization"])
                if scripted.status != 200:
                    self._send(b'{"error": {"message": "no room"}}', scripted.status)
                    return
                events = [json.dumps(event) for event in scripted.events(body)]
                text = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
                self._send(f": keep-alive\n\n{text}".encode())

            def _send(self, content: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler
