"""Request ids: the client's if it is valid, else a new one.

Invariant: an id is 1 to 128 characters of letters, digits and `._:-`, so that it can be put
into logs, headers and the engine's own ids as it is.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"
"""Header in which Anthropic's API returns it."""

_HARMLESS = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's id if it is valid, else a new one."""
    for name, value in headers:
        if name == HEADER and _HARMLESS.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex


def with_request_id(
    headers: Iterable[tuple[bytes, bytes]], request_id: str
) -> list[tuple[bytes, bytes]]:
    """Return the headers with exactly this id, for handlers that read it from there."""
    kept = [(name, value) for name, value in headers if name != HEADER]
    return [*kept, (HEADER, request_id.encode("ascii"))]
