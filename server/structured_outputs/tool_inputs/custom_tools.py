"""Custom tools of OpenAI's APIs as functions with one argument, which vLLM knows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from server.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingFieldError,
    UnsupportedFieldError,
    describe,
)
from server.tools import FIELD, get_field
from server.wire.endpoint import Endpoint, JsonObject

KIND = "custom"
INPUT = "input"
"""The only argument of the function that replaces a custom tool."""
_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
CALL = "custom_tool_call"
_OUTPUT = "custom_tool_call_output"
_FIELDS = ("name", "description", "format")
_NESTED = frozenset((Endpoint.CHAT, Endpoint.RENDER_CHAT, Endpoint.TOKENIZE))
"""Endpoints whose tools and calls have an object of their kind, as chats have."""
_FLAT = frozenset((Endpoint.RESPONSES, Endpoint.INPUT_TOKENS, Endpoint.COMPACT))

OnUnknown = Callable[[str, tuple[str, ...]], None]
"""Called with the path of an unknown field and the names of the known ones."""


def take_custom_tools(
    endpoint: Endpoint, body: JsonObject, on_unknown: OnUnknown
) -> frozenset[str]:
    """Replace custom tools, choices and calls of them in `body`; return the tools' names.

    Raises a `RequestError` for the first malformed part.
    """
    if endpoint not in _NESTED and endpoint not in _FLAT:
        return frozenset()
    nested = endpoint in _NESTED
    tools = body.get("tools")
    taker = _Taker(nested, on_unknown)
    if isinstance(tools, list):
        body["tools"] = [taker.tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    taker.replace_choice(body)
    for holder, index, call, path in list(_calls(body, nested=nested)):
        holder[index] = taker.call(call, path)
    return frozenset(taker.names)


@dataclass
class _Taker:
    nested: bool
    on_unknown: OnUnknown
    names: set[str] = field(default_factory=set)

    def tool(self, tool: Any, path: str) -> Any:
        """Return the function for a custom tool; others as they are."""
        if get_field(tool, "type") == "namespace":
            inner = get_field(tool, "tools")
            for index, one in enumerate(inner if isinstance(inner, list) else ()):
                if get_field(one, "type") == KIND:
                    place = f"{path}.tools[{index}].type"
                    raise UnsupportedFieldError(
                        f"'{place}' is not supported: tools of a namespace are functions.",
                        param=place,
                    )
        if get_field(tool, "type") != KIND:
            return tool
        given, place = self._inner(tool, path)
        name = _text(given, "name", place)
        if name in self.names:
            raise InvalidValueError(
                f"'{place}.name' is that of another custom tool, {describe(name)}.",
                param=f"{place}.name",
            )
        self.names.add(name)
        if self.nested:
            for other in given.keys() - set(_FIELDS):
                self.on_unknown(f"{place}.{other}", _FIELDS)
        self._check_format(given.get("format"), f"{place}.format")
        function: JsonObject = {"name": name, "parameters": _PARAMETERS}
        if given.get("description") is not None:
            function["description"] = given["description"]
        rest = {k: v for k, v in tool.items() if k not in (*_FIELDS, KIND)}
        return {**rest, "type": "function"} | ({"function": function} if self.nested else function)

    def _check_format(self, value: Any, path: str) -> None:
        if value is None:
            return
        kind = _text(value, "type", path)
        if kind == "grammar":
            raise UnsupportedFieldError(
                f"'{path}' is not supported: no grammar guides the input of a custom tool; use "
                "'text', or a function with a schema.",
                param=path,
            )
        if kind != "text":
            raise InvalidValueError(
                f"'{path}.type' must be 'text', got {describe(kind)}.", param=f"{path}.type"
            )
        self._check_known(value, ("type",), path)

    def replace_choice(self, body: JsonObject) -> None:
        """Replace the custom tools of `tool_choice`."""
        choice = body.get(FIELD)
        kind = get_field(choice, "type")
        if kind == KIND:
            body[FIELD] = self._named(choice, FIELD)
        elif kind == "allowed_tools":
            path = f"{FIELD}.allowed_tools" if self.nested else FIELD
            tools = get_field(get_field(choice, kind) if self.nested else choice, "tools")
            for index, tool in enumerate(tools if isinstance(tools, list) else ()):
                if get_field(tool, "type") == KIND:
                    tools[index] = self._named(tool, f"{path}.tools[{index}]")

    def _named(self, choice: Any, path: str) -> JsonObject:
        given, place = self._inner(choice, path)
        name = _text(given, "name", place)
        if name not in self.names:
            known = ", ".join(map(describe, sorted(self.names))) or "none"
            raise InvalidValueError(
                f"'{place}.name' must be the name of a custom tool of the request, got "
                f"{describe(name)}; its custom tools are {known}.",
                param=f"{place}.name",
            )
        if self.nested:
            return {"type": "function", "function": {"name": name}}
        return {"type": "function", "name": name}

    def call(self, call: JsonObject, path: str) -> JsonObject:
        """Return a call of a custom tool, or its output, as one of a function."""
        if call["type"] == _OUTPUT:
            return {**call, "type": "function_call_output"}
        given, place = self._inner(call, path)
        arguments = json.dumps({INPUT: _text(given, INPUT, place)}, ensure_ascii=False)
        function = {"name": _text(given, "name", place), "arguments": arguments}
        if self.nested:
            return {"type": "function", "function": function} | (
                {"id": call["id"]} if "id" in call else {}
            )
        rest = {k: v for k, v in call.items() if k != INPUT and v is not None}
        return {**rest, **function, "type": "function_call"}

    def _inner(self, value: JsonObject, path: str) -> tuple[JsonObject, str]:
        """Return the object with the name, and its path."""
        if not self.nested:
            return value, path
        return _object(value, KIND, path), f"{path}.{KIND}"

    def _check_known(self, value: JsonObject, known: tuple[str, ...], path: str) -> None:
        for name in value:
            if name not in known:
                self.on_unknown(f"{path}.{name}", known)


def _calls(body: JsonObject, *, nested: bool) -> Iterator[tuple[list[Any], int, JsonObject, str]]:
    """Yield each call of a custom tool or its output: its list, its index and its path."""
    turns = body.get("messages" if nested else "input")
    if not isinstance(turns, list):
        return
    for index, turn in enumerate(turns):
        if not nested and get_field(turn, "type") in (CALL, _OUTPUT):
            yield turns, index, turn, f"input[{index}]"
        calls = get_field(turn, "tool_calls") if nested else None
        if not isinstance(calls, list):
            continue
        for place, call in enumerate(calls):
            if get_field(call, "type") == KIND:
                yield calls, place, call, f"messages[{index}].tool_calls[{place}]"


def _object(value: Any, name: str, path: str) -> JsonObject:
    found = _required(value, name, path)
    if not isinstance(found, dict):
        raise InvalidTypeError(
            f"'{path}.{name}' must be an object, got {describe(found)}.", param=f"{path}.{name}"
        )
    return found


def _text(value: Any, name: str, path: str) -> str:
    found = _required(value, name, path)
    if not isinstance(found, str):
        raise InvalidTypeError(
            f"'{path}.{name}' must be a string, got {describe(found)}.", param=f"{path}.{name}"
        )
    return found


def _required(value: Any, name: str, path: str) -> Any:
    if not isinstance(value, dict):
        raise InvalidTypeError(f"'{path}' must be an object, got {describe(value)}.", param=path)
    if value.get(name) is None:
        raise MissingFieldError(f"The field '{path}.{name}' is missing.", param=f"{path}.{name}")
    return value[name]
