"""Read a request body from the socket, parse it as a JSON object, and check its conversation.

vLLM's models of messages and of items of `input` are unions of dozens of types, some read late:
their errors are about another type, or have no place. Here each field that all conversations have
is checked where it is. Null is as absent. The work is linear in the size of the conversation.
"""

from __future__ import annotations

import asyncio
import json
import re
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from server import bounds
from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidJsonError,
    InvalidTypeError,
    MediaTypeError,
    MissingFieldError,
    describe,
    invalid_value,
    json_type,
)
from server.settings import ServerSettings
from server.tools import replace_halves
from server.wire import Endpoint, JsonObject

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
    if raw.count(b"{") + raw.count(b"[") > max_depth:
        below = next(islice(_levels(body), max_depth, None), [])
        if any(isinstance(value, dict | list) for value in below):
            raise InvalidJsonError(
                f"The request body is nested deeper than the limit of {max_depth}."
            )
    if MANY_DIGITS.search(raw) is not None and any(
        isinstance(value, int) and abs(value) >= 10**MAX_DIGITS
        for level in _levels(body)
        for value in level
    ):
        # Python refuses to format integers of thousands of digits, in error messages too.
        raise InvalidJsonError(f"A number in the request body has more than {MAX_DIGITS} digits.")
    return body


def _levels(body: JsonObject) -> Iterator[list[object]]:
    """Yield the values of each level of nesting, `body` first."""
    level: list[object] = [body]
    while level:
        yield level
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]


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


_MESSAGE_TEXTS = ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")
"""Optional texts of a message."""
_CALL, _OUTPUT = "function_call", "function_call_output"
_MESSAGE, _REASONING = "message", "reasoning"
_ITEM_TYPES = (
    _MESSAGE,
    _CALL,
    _OUTPUT,
    _REASONING,
    "custom_tool_call",
    "custom_tool_call_output",
    "compaction",
    "compaction_trigger",
)
_ITEM_TEXTS: Mapping[str, Sequence[str]] = {
    _CALL: ("call_id", "name"),
    _OUTPUT: ("call_id",),
    _REASONING: (),
    _MESSAGE: ("role",),
}
"""Required texts of an item by its type."""
_ROLES = ("user", "assistant", "system", "developer")
_ANSWER_PARTS: Mapping[str, str | None] = {
    "output_text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "text": "text",
}
_PROMPT_PARTS: Mapping[str, str | None] = {
    "input_text": "text",
    "input_image": None,
    "input_file": None,
}
"""Types of the parts of a message, with the field of their text."""


def normalize_conversation(endpoint: Endpoint, body: JsonObject) -> None:
    """Check the conversation of `body` and replace what vLLM does not read.

    Raises a `RequestError` that names the first wrong field.
    """
    messages, items = body.get("messages"), body.get("input")
    if isinstance(messages, list) and not endpoint.anthropic:
        for index, message in enumerate(messages):
            if not isinstance(message, dict):
                continue
            path = f"messages[{index}]"
            for name in _MESSAGE_TEXTS:
                _check(message, name, str, path)
            # Many clients send vLLM's `reasoning` by this name.
            if (reasoning := message.pop("reasoning_content", None)) is not None:
                message.setdefault("reasoning", reasoning)
            calls = _check(message, "tool_calls", list, path)
            for number, call in enumerate(calls or ()):
                _check_call(call, f"{path}.tool_calls[{number}]")
            content = message.get("content")
            if content is None and message.get("role") == "tool":
                message["content"] = ""
            elif content is not None and not isinstance(content, str | list):
                raise _wrong_type(f"{path}.content", "a string or an array of parts", content)
    if isinstance(items, list) and endpoint.takes_items:
        body["input"] = [
            _normalized_item(item, f"input[{index}]") for index, item in enumerate(items)
        ]
    elif endpoint.takes_items and items is not None and not isinstance(items, str):
        raise _wrong_type("input", "a string or an array of items", items)


def _check_call(call: Any, path: str) -> None:
    """Check a call of a message; calls of custom tools are calls of functions already."""
    if not isinstance(call, dict):
        raise _wrong_type(path, "an object", call)
    _require(call, "id", str, path)
    kind = _require(call, "type", str, path)
    if kind != "function":
        raise invalid_value(f"{path}.type", "be one of function, custom", kind)
    function = _require(call, "function", dict, path)
    _require(function, "name", str, f"{path}.function")
    if _check(function, "arguments", str, f"{path}.function") is None:
        function["arguments"] = ""


def _normalized_item(item: Any, path: str) -> Any:
    if not isinstance(item, dict):
        raise _wrong_type(path, "an object", item)
    item = {name: value for name, value in item.items() if value is not None}
    is_message = bool(item.keys() & {"role", "content"})
    kind = _require(item, "type", str, path) if "type" in item or not is_message else _MESSAGE
    if kind not in _ITEM_TEXTS:
        raise invalid_value(f"{path}.type", f"be one of {', '.join(_ITEM_TYPES)}", kind)
    for name in _ITEM_TEXTS[kind]:
        _require(item, name, str, path)
    if kind == _CALL and _check(item, "arguments", str, path) is None:
        item["arguments"] = "{}"
    elif kind == _OUTPUT and not isinstance(_require(item, "output", object, path), str | list):
        raise _wrong_type(f"{path}.output", "a string or an array of parts", item["output"])
    elif kind == _REASONING:
        item.setdefault("summary", [])
    elif kind == _MESSAGE:
        _normalize_content(item, path)
    return item


def _normalize_content(item: JsonObject, path: str) -> None:
    """Check a message of `input`; make one part of the texts of an assistant's."""
    role = item["role"]
    if role not in _ROLES:
        raise invalid_value(f"{path}.role", f"be one of {', '.join(_ROLES)}", role)
    is_answer = role == "assistant"
    content: Any = item.setdefault("content", "") if is_answer else item.get("content")
    if isinstance(content, str) and not (is_answer and item.keys() & {"id", "status"}):
        return
    if isinstance(content, str):
        # vLLM's items with an id or a status have parts.
        content = [{"type": "output_text", "text": content}]
    elif not isinstance(_require(item, "content", object, path), list):
        raise _wrong_type(f"{path}.content", "a string or an array of parts", content)
    read = [_part(part, f"{path}.content[{n}]", role) for n, part in enumerate(content)]
    item["content"] = [part for part, _ in read]
    if is_answer:
        merged: JsonObject = {"annotations": []}
        for part, _ in read:
            merged |= part
        merged.pop("refusal", None)
        # As in chats, a line for each part.
        item["content"] = [
            {**merged, "type": "output_text", "text": "\n".join(text for _, text in read)}
        ]
        item |= {"id": item.get("id", "msg"), "type": _MESSAGE}
        item.setdefault("status", "completed")


def _part(part: Any, path: str, role: str) -> tuple[JsonObject, str]:
    """Return a part of a message without null, and its text."""
    if not isinstance(part, dict):
        raise _wrong_type(path, "an object", part)
    part = {name: value for name, value in part.items() if value is not None}
    kind = _require(part, "type", str, path)
    fields = _ANSWER_PARTS if role == "assistant" else _PROMPT_PARTS
    if kind not in fields:
        raise invalid_value(f"{path}.type", f"be one of {', '.join(fields)}", kind)
    field = fields[kind]
    return part, "" if field is None else _require(part, field, str, path)


_NAMES: Mapping[type, str] = {str: "a string", list: "an array", dict: "an object"}


def _check(holder: JsonObject, name: str, kind: type, path: str) -> Any:
    """Return a field of the right type, or None, removing null."""
    value = holder.get(name)
    if value is None:
        holder.pop(name, None)
    elif not isinstance(value, kind):
        raise _wrong_type(f"{path}.{name}", _NAMES[kind], value)
    return value


def _require(holder: JsonObject, name: str, kind: type, path: str) -> Any:
    value = _check(holder, name, kind, path)
    if value is None:
        raise MissingFieldError(f"The field '{path}.{name}' is missing.", param=f"{path}.{name}")
    return value


def _wrong_type(path: str, must: str, value: object) -> InvalidTypeError:
    kind = json_type(value)
    shown = kind if value is None else f"{kind}: {describe(value)}"
    return InvalidTypeError(f"Invalid type for '{path}': must be {must}, got {shown}.", param=path)


# Claude Code's billing line changes with every request and says nothing to a model.

_BILLING = re.compile(r"^x-anthropic-billing-header:.*(?:\n|\Z)", re.MULTILINE)
_SYSTEM_ROLES = ("system", "developer")


def drop_billing_line(body: JsonObject) -> None:
    """Drop the line from the system texts of a body of Anthropic's API, in place.

    A prefix match ends at the first token that differs, so the line would prevent every match.
    Anthropic's API shows it to no model, either.
    """
    if "system" in body:
        body["system"] = _without_line(body["system"])
    turns = body.get("messages")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and turn.get("role") in _SYSTEM_ROLES and "content" in turn:
            turn["content"] = _without_line(turn["content"])


def _without_line(content: Any) -> Any:
    """Return a text, or a list of parts, without the line; parts that become empty go."""
    if isinstance(content, str):
        return _BILLING.sub("", content)
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if isinstance(part, dict) and isinstance(before := part.get("text"), str):
            text = _BILLING.sub("", before)
            if before and not text:
                continue
            part["text"] = text
        parts.append(part)
    return parts
