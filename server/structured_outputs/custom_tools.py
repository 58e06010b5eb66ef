"""Custom tools of OpenAI's APIs as functions with one argument, which vLLM knows.

The input of a call is read from the arguments of its function. The JSON schemas, which
vLLM's models lack, are for the OpenAPI document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingFieldError,
    UnsupportedFieldError,
    describe,
    invalid_value,
)
from server.tools import FIELD, get_field
from server.wire import Endpoint, JsonObject

T = TypeVar("T")

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
    # The list, the index and the path of each call of a custom tool or its output.
    calls: list[tuple[list[Any], int, str]] = []
    turns: Any = body.get("messages" if nested else "input")
    for index, turn in enumerate(turns if isinstance(turns, list) else ()):
        if not isinstance(turn, dict):
            continue
        if not nested:
            if turn.get("type") in (CALL, _OUTPUT):
                calls.append((turns, index, f"input[{index}]"))
            continue
        made: Any = turn.get("tool_calls")
        for number, call in enumerate(made if isinstance(made, list) else ()):
            if get_field(call, "type") == KIND:
                calls.append((made, number, f"messages[{index}].tool_calls[{number}]"))
    if not calls and not body.keys() & {"tools", FIELD}:
        return frozenset()
    tools = body.get("tools")
    taker = _Taker(nested, on_unknown)
    if isinstance(tools, list):
        body["tools"] = [taker.tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    taker.replace_choice(body)
    for holder, index, path in calls:
        holder[index] = taker.call(holder[index], path)
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
            raise invalid_value(f"{path}.type", "be 'text'", kind)
        for name in value:
            if name != "type":
                self.on_unknown(f"{path}.{name}", ("type",))

    def replace_choice(self, body: JsonObject) -> None:
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
        found: JsonObject = _field(value, KIND, path, dict)
        return found, f"{path}.{KIND}"


def _field(value: Any, name: str, path: str, kind: type[T]) -> T:
    if not isinstance(value, dict):
        raise InvalidTypeError(f"'{path}' must be an object, got {describe(value)}.", param=path)
    path = f"{path}.{name}"
    if (found := value.get(name)) is None:
        raise MissingFieldError(f"The field '{path}' is missing.", param=path)
    if not isinstance(found, kind):
        what = "a string" if kind is str else "an object"
        raise InvalidTypeError(f"'{path}' must be {what}, got {describe(found)}.", param=path)
    return found


def _text(value: Any, name: str, path: str) -> str:
    return _field(value, name, path, str)


_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HEAD_PARTS = ("{", f'"{INPUT}"', ":", '"')
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])", re.DOTALL)
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_PAIR = re.compile(_HIGH + r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF_PAIR = re.compile(_HIGH + r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_HALVES = range(0xD800, 0xE000)


class InputReader:
    """Turns pieces of arguments, `{"input": "…"}`, into pieces of the input.

    Arguments of another form, which no grammar has guided, are the input as they are.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state = "head"

    def read(self, piece: str) -> str:
        """Return the part of the input that is known after one more piece of the arguments."""
        self._held += piece
        if self._state == "head":
            found = _HEAD.match(self._held)
            if found is not None:
                self._held, self._state = self._held[found.end() :], "string"
            elif not _may_become_head(self._held):
                self._state = "plain"
        if self._state == "plain":
            text, self._held = self._held, ""
            return text
        return self._string() if self._state == "string" else ""

    def end(self) -> str:
        """Return the rest of the input, after the last piece."""
        text = self._held if self._state == "head" else ""
        self._held, self._state = "", "ended"
        return text

    def _string(self) -> str:
        parts: list[str] = []
        text, at = self._held, 0
        while at < len(text) and text[at] != '"':
            found = _PLAIN.match(text, at) or _escape(text, at)
            if found is None:
                break
            part = found[0]
            if part[0] == "\\":
                if part[1] != "u":
                    part = _LETTERS.get(part[1], part[1])
                else:
                    part = json.loads(f'"{part}"')
                    # Half of a pair.
                    part = "\ufffd" if ord(part[0]) in _HALVES else part
            parts.append(part)
            at = found.end()
        self._held = text[at:]
        if self._held.startswith('"'):
            self._held, self._state = "", "ended"
        return "".join(parts)


def get_input(arguments: str) -> str:
    """Return the input in whole or cut arguments, as a stream of them delivers it."""
    reader = InputReader()
    return reader.read(arguments) + reader.end()


def _may_become_head(text: str) -> bool:
    """Return whether more text may complete the beginning of the arguments."""
    rest = text
    for part in _HEAD_PARTS:
        rest = rest.lstrip()
        if not rest.startswith(part):
            return part.startswith(rest)
        rest = rest[len(part) :]
    return True


def _escape(text: str, at: int) -> re.Match[str] | None:
    """Return the escape at a place of a text; None if more text may belong to it."""
    if (pair := _PAIR.match(text, at)) is not None:
        return pair
    if _HALF_PAIR.fullmatch(text, at):
        return None
    return _ESCAPE.match(text, at)


def _custom(described: str, properties: JsonObject, *required: str) -> JsonObject:
    holder = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "object",
        "description": described,
        "properties": {"type": {"const": KIND}, KIND: holder},
        "required": ["type", KIND],
    }


_TEXT: JsonObject = {"type": "string"}
_FORMAT: JsonObject = {
    "type": "object",
    "properties": {"type": {"const": "text"}},
    "required": ["type"],
}

TOOL_SCHEMA = _custom(
    "A tool with a text as its input.",
    {"name": _TEXT, "description": _TEXT, "format": _FORMAT},
    "name",
)
CHOICE_SCHEMA = _custom("The custom tool that must be called.", {"name": _TEXT}, "name")
CALL_SCHEMA = _custom("A call of a custom tool.", {"name": _TEXT, "input": _TEXT}, "name", "input")
CALL_SCHEMA["properties"]["id"] = _TEXT
