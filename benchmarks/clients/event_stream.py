"""One streamed request to a server, event by event."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.engines.server_process import ServerProcess


def events(
    server: ServerProcess, path: str, body: dict[str, Any], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the JSON events of an answer. Raises ServerError for another status than 200."""
    connection = http.client.HTTPConnection("127.0.0.1", server.serving.port, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise server.error(f"answered {answer.status}: {answer.read(300)!r}")
        yield from (json.loads(line[6:]) for line in answer if line.startswith(b"data: {"))
    finally:
        connection.close()
