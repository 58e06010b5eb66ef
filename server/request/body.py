"""Read a request body from the socket and parse it as a JSON object, within limits."""

from __future__ import annotations

import asyncio
import json
import re
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from server import bounds
from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidJsonError,
    MediaTypeError,
    describe,
    json_type,
)
from server.settings import ServerSettings
from server.tools import replace_halves
from server.wire import JsonObject

JSON_TYPE = "application/json"
MAX_PLAIN_BYTES = 256 * 1024
"""Largest body that is parsed on the event loop; larger than the largest schema."""
MAX_PLAIN_CONTAINERS = 16 * 1024
"""Most objects and arrays of such a body, brackets in texts included; they take about 5 ms."""
_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^";\s]*)', re.IGNORECASE)
MAX_DIGITS = 400
MANY_DIGITS = re.compile(rb"\d{%d}" % (MAX_DIGITS + 1))
_HALF = re.compile("[\ud800-\udfff]")
CLIENT_GONE = 499
"""Status in logs and metrics of a request whose client has closed the connection."""


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def read_json_object(request: Request, settings: ServerSettings) -> JsonObject:
    """Return the body of a route without prompts; raises as `read_body` and `parse_json_object`."""
    raw = await read_body(request, settings)
    if len(raw) > MAX_PLAIN_BYTES:
        raise BodyTooLargeError(
            f"The request body is larger than the limit of {MAX_PLAIN_BYTES} bytes of this route."
        )
    if (count := raw.count(b"{") + raw.count(b"[")) > MAX_PLAIN_CONTAINERS:
        raise BodyTooLargeError(
            f"The request body has {count} objects and arrays; at most {MAX_PLAIN_CONTAINERS} are "
            "allowed on this route."
        )
    return parse_json_object(raw, bounds.MAX_JSON_DEPTH)


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the body's bytes.

    Raises `MediaTypeError`, `BodyTooLargeError` (at once where the client says so, else after at
    most `max_body_bytes`), `BodyTimeoutError` or `ClientGoneError`.
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.split(";")[0].strip().lower()
    if media_type != JSON_TYPE:
        raise MediaTypeError(f"The content type must be {JSON_TYPE}, got {describe(media_type)}.")
    charset = _CHARSET.search(content_type)
    if charset is not None and charset[1].lower() not in ("utf-8", "utf8"):
        raise MediaTypeError(f"JSON is read as UTF-8; the charset is {describe(charset[1])}.")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:18]) > settings.max_body_bytes:
        raise _too_large(settings)
    try:
        async with body_timeout():
            chunks: list[bytes] = []
            size = 0
            async for chunk in request.stream():
                size += len(chunk)
                if size > settings.max_body_bytes:
                    # The rest is read and dropped: closing now could lose the response.
                    raise _too_large(settings)
                chunks.append(chunk)
            # RFC 8259 lets a reader ignore a byte order mark.
            return b"".join(chunks).removeprefix(BOM_UTF8)
    except ClientDisconnect:
        raise ClientGoneError from None


@asynccontextmanager
async def body_timeout() -> AsyncIterator[None]:
    """Bound the time in which the block receives a body. Raises `BodyTimeoutError`."""
    try:
        async with asyncio.timeout(bounds.BODY_TIMEOUT_S):
            yield
    except TimeoutError:
        raise BodyTimeoutError(
            f"The request body did not arrive within {bounds.BODY_TIMEOUT_S:g} s.",
            # The rest of the body would be parsed as the next request.
            headers={"connection": "close"},
        ) from None


def _too_large(settings: ServerSettings) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"The request body is larger than the limit of {settings.max_body_bytes} bytes "
        "(--max-body-bytes)."
    )


def parse_json_object(raw: bytes, max_depth: int) -> JsonObject:
    """Return a JSON object that is nested at most `max_depth` deep. Raises `InvalidJsonError`."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        if (without_halves := _with_whole_inputs(raw)) != raw:
            return parse_json_object(without_halves, max_depth)
        path = _halved_text(raw) or None
        what = str(error) if path is None else f"'{path}' has half of a surrogate pair ({error})"
        raise InvalidJsonError(f"The request body is not valid JSON: {what}.", param=path) from None
    if not isinstance(body, dict):
        raise InvalidJsonError(f"The request body must be a JSON object, got {json_type(body)}.")
    # Counting brackets is cheap and rules out nearly every body.
    if raw.count(b"{") + raw.count(b"[") > max_depth and _is_deeper(body, max_depth):
        raise InvalidJsonError(f"The request body is nested deeper than the limit of {max_depth}.")
    if MANY_DIGITS.search(raw) is not None and _has_huge_number(body):
        # Python refuses to format integers of thousands of digits, in error messages too.
        raise InvalidJsonError(f"A number in the request body has more than {MAX_DIGITS} digits.")
    return body


def _with_whole_inputs(raw: bytes) -> bytes:
    """Return a body whose calls of Anthropic's form have no halves of surrogate pairs.

    These are arguments that an answer had, and that its client has parsed.
    """
    if b'"tool_use"' not in raw:
        return raw
    try:
        body = json.loads(raw)
        changed = False
        for message in body["messages"]:
            parts = message["content"]
            for part in parts if isinstance(parts, list) else ():
                if part.get("type") == "tool_use":
                    text = json.dumps(part["input"])
                    part["input"] = json.loads(replace_halves(text))
                    changed = changed or json.dumps(part["input"]) != text
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return raw
    return json.dumps(body).encode() if changed else raw


def _halved_text(raw: bytes) -> str | None:
    """Return the path of a text with half of a surrogate pair, which only Python's JSON has."""
    try:
        pending = [("", json.loads(raw))]
    except (ValueError, RecursionError):
        return None
    while pending:
        path, value = pending.pop()
        if isinstance(value, str) and _HALF.search(value):
            return path
        if isinstance(value, list):
            pending += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        if isinstance(value, dict):
            # The name of a field may have one, too.
            pending += [(path, name) for name in value]
            pending += [(f"{path}.{name}" if path else name, value[name]) for name in value]
    return None


def _has_huge_number(body: JsonObject) -> bool:
    level: list[object] = [body]
    while level:
        if any(isinstance(value, int) and abs(value) >= 10**MAX_DIGITS for value in level):
            return True
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    return False


def _is_deeper(body: JsonObject, max_depth: int) -> bool:
    """Return True if containers are nested more than `max_depth` deep, `body` being the first."""
    level: list[object] = [body]
    for _ in range(max_depth):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)  # type: ignore[attr-defined]
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
