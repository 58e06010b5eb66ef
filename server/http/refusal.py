"""An error that is answered before, or without, a request: as bytes for the wire."""

from __future__ import annotations

import http
import uuid
from collections.abc import Iterable

from server.errors import ServerError
from server.request.request_id import HEADER


def refusal(error: ServerError, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the whole answer: envelope, a request id of its own, and the connection's end."""
    body = error.body()
    status = http.HTTPStatus(error.status)
    headers = [
        *default_headers,
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (HEADER, uuid.uuid4().hex.encode("ascii")),
        (b"connection", b"close"),
    ]
    lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"", body])
