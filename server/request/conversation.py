"""Checks messages of chats and items of `input` before vLLM's models read them.

Those models are unions of dozens of types, some read late: their errors are about another type, or
have no place. Here each field that all conversations have is checked where it is. Null is as
absent. Pure functions, linear in the size of the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import InvalidTypeError, MissingFieldError, describe, invalid_value, json_type
from server.wire import Endpoint, JsonObject

_MESSAGE_TEXTS = ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")
"""Optional texts of a message."""
_CALL, _OUTPUT = "function_call", "function_call_output"
_MESSAGE, _REASONING = "message", "reasoning"
_ITEM_TYPES = (
    *(_MESSAGE, _CALL, _OUTPUT, _REASONING, "custom_tool_call", "custom_tool_call_output"),
    *("compaction", "compaction_trigger"),
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
            if isinstance(message, dict):
                _normalize_message(message, f"messages[{index}]")
    if isinstance(items, list) and endpoint.takes_items:
        body["input"] = [
            _normalized_item(item, f"input[{index}]") for index, item in enumerate(items)
        ]
    elif endpoint.takes_items and items is not None and not isinstance(items, str):
        raise _wrong_type("input", "a string or an array of items", items)


def _normalize_message(message: JsonObject, path: str) -> None:
    for name in _MESSAGE_TEXTS:
        _check(message, name, str, path)
    # Many clients send vLLM's `reasoning` by this name.
    if (reasoning := message.pop("reasoning_content", None)) is not None:
        message.setdefault("reasoning", reasoning)
    calls = _check(message, "tool_calls", list, path)
    for index, call in enumerate(calls or ()):
        _check_call(call, f"{path}.tool_calls[{index}]")
    content = message.get("content")
    if content is None and message.get("role") == "tool":
        message["content"] = ""
    elif content is not None and not isinstance(content, str | list):
        raise _wrong_type(f"{path}.content", "a string or an array of parts", content)


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


def drop_billing_line(endpoint: Endpoint, body: JsonObject) -> None:
    """Drop the line from the system texts of a body, in place, if the API is Anthropic's.

    A prefix match ends at the first token that differs, so the line would prevent every match.
    Anthropic's API shows it to no model, either.
    """
    if not endpoint.anthropic:
        return
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
