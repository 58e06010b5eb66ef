"""Tools of requests: their checks, the choice among them, and how an answer with calls ends."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic_core import from_json

from server.errors import (
    InvalidValueError,
    MissingFieldError,
    UnsupportedFieldError,
    describe,
    invalid_value,
)
from server.wire import Endpoint, JsonObject

FIELD = "tool_choice"
_ALLOWED = "allowed_tools"
_FORCING = frozenset(("required", "any"))
_NAMING = frozenset(("function", "tool"))
_MODES = ("auto", "required")
_CALLING = frozenset(
    (
        Endpoint.CHAT,
        Endpoint.RENDER_CHAT,
        Endpoint.RESPONSES,
        Endpoint.INPUT_TOKENS,
        Endpoint.MESSAGES,
    )
)

ALLOWED_SCHEMA: JsonObject = {
    "type": "object",
    "description": "The tools that may be called, or must be with `required`.",
    "properties": {
        "type": {"const": _ALLOWED},
        _ALLOWED: {
            "type": "object",
            "properties": {
                "mode": {"enum": list(_MODES)},
                "tools": {"type": "array", "minItems": 1, "items": {"type": "object"}},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", _ALLOWED],
}
"""JSON schema of the form `allowed_tools`, which vLLM's chat request lacks."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Mode `none`, `auto` or `required`; `names` are the allowed tools, None for all.

    `listed`: the names are from the form `allowed_tools`.
    """

    mode: str = "auto"
    names: frozenset[str] | None = None
    listed: bool = False

    @classmethod
    def of(cls, value: Any) -> ToolChoice:
        """Return the choice of a `tool_choice` in the form of any API.

        Unknown forms are `auto`; the request models reject them.
        """
        kind = value if isinstance(value, str) else get_field(value, "type")
        if kind == "none":
            return cls("none")
        if kind in _FORCING:
            return cls("required")
        if kind in _NAMING:
            name = _get_name(value)
            return cls("required", None if name is None else frozenset((name,)))
        if kind == _ALLOWED:
            holder = get_field(value, _ALLOWED) or value
            tools = get_field(holder, "tools")
            names = map(_get_name, tools if isinstance(tools, list) else ())
            mode = "required" if get_field(holder, "mode") == "required" else "auto"
            return cls(mode, frozenset(filter(None, names)), listed=True)
        return cls()

    @property
    def forces(self) -> bool:
        return self.mode == "required"

    def allows(self, name: object) -> bool:
        return self.mode != "none" and (self.names is None or name in self.names)


def check_choice(endpoint: Endpoint, fields: JsonObject) -> None:
    """Raise a `RequestError` for the first invalid part of `tool_choice`.

    The request models reject values of a wrong JSON type.
    """
    value = fields.get(FIELD)
    if endpoint not in _CALLING or not isinstance(value, str | dict):
        return
    offered = list(_names(fields.get("tools")))
    if ToolChoice.of(value).forces and not fields.get("tools"):
        raise InvalidValueError(
            f"'{FIELD}' demands a call of a tool, and the request has no 'tools'.", param=FIELD
        )
    kind = get_field(value, "type")
    if kind == _ALLOWED and endpoint is not Endpoint.MESSAGES:
        holder, path = value, FIELD
        if endpoint.chats:
            path = f"{FIELD}.{_ALLOWED}"
            holder = _require(value, _ALLOWED, path)
        mode = _require(holder, "mode", f"{path}.mode")
        if mode not in _MODES:
            raise invalid_value(f"{path}.mode", "be 'auto' or 'required'", mode)
        tools = _require(holder, "tools", f"{path}.tools")
        if not isinstance(tools, list) or not tools:
            raise invalid_value(f"{path}.tools", "be an array of at least one tool", tools)
        for index, tool in enumerate(tools):
            tool_path = f"{path}.tools[{index}]"
            if (kind := get_field(tool, "type")) != "function":
                raise invalid_value(f"{tool_path}.type", "be 'function' or 'custom'", kind)
            if endpoint.chats:
                tool, tool_path = (
                    _require(tool, "function", f"{tool_path}.function"),
                    f"{tool_path}.function",
                )
            _check_name(_require(tool, "name", f"{tool_path}.name"), f"{tool_path}.name", offered)
    elif kind in _NAMING and _get_name(value) is not None:
        path = f"{FIELD}.function.name" if get_field(value, "function") else f"{FIELD}.name"
        _check_name(_get_name(value), path, offered)


def _check_name(name: Any, path: str, offered: list[str]) -> None:
    if name not in offered:
        known = ", ".join(map(describe, offered)) or "none"
        raise InvalidValueError(
            f"'{path}' must be the name of a tool of the request, got {describe(name)}; "
            f"its tools are {known}.",
            param=path,
        )


def _names(tools: Any) -> Iterator[str]:
    """Yield the names of tools; those of a namespace with and without its name."""
    for tool in tools if isinstance(tools, list) else ():
        name = _get_name(tool)
        if name is not None and get_field(tool, "type") != "namespace":
            yield name
        for inner in _names(get_field(tool, "tools")):
            yield from (inner, f"{name}__{inner}")


def _get_name(tool: Any) -> str | None:
    name = get_field(get_field(tool, "function"), "name") or get_field(tool, "name")
    return name if isinstance(name, str) else None


def _require(value: Any, name: str, path: str) -> Any:
    field = get_field(value, name)
    if field is None:
        raise MissingFieldError(f"The field '{path}' is missing.", param=path)
    return field


def get_field(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


MAX_NAME_CHARACTERS = 256
_UNCALLABLE = frozenset('"\\<>')
"""They end a name in the forms of calls, or begin their marks."""
_CONTINUING = "continue_final_message"
TOOL_FIELDS = frozenset(("tools", _CONTINUING))
"""Fields that `check_tools` is about."""


def check_tools(endpoint: Endpoint, body: JsonObject) -> None:
    """Raise `InvalidValueError` for a tool that no call can name, or calls to be continued."""
    if endpoint.pools:
        return
    for name, path in _paths(body.get("tools"), "tools"):
        fits = 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
        if not fits or not name.strip() or _UNCALLABLE & set(name):
            must = f"have 1 to {MAX_NAME_CHARACTERS} printable characters and no quotation mark, "
            raise invalid_value(path, must + "\\, < or >", name)
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if body.get(_CONTINUING) is True and get_field(last, "tool_calls"):
        path = f"messages[{len(messages or ()) - 1}].tool_calls"
        raise InvalidValueError(
            f"'{path}' cannot be continued: '{_CONTINUING}' continues the text of a message; send "
            "its calls as text, or leave them out.",
            param=path,
        )


def _paths(tools: Any, path: str) -> Iterator[tuple[str, str]]:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        tool_path = f"{path}[{index}]"
        for holder, at in (
            (tool, tool_path),
            *((get_field(tool, kind), f"{tool_path}.{kind}") for kind in ("function", "custom")),
        ):
            name = get_field(holder, "name")
            if isinstance(name, str):
                yield name, f"{at}.name"
        yield from _paths(get_field(tool, "tools"), f"{tool_path}.tools")


PromptSource = Literal["template", "default", "none"]
_CALLS = frozenset(("function_call", "function_call_output", "tool_use", "tool_result"))
"""Types of input items and content blocks with tool calls or their results."""


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Source of the prompt that describes tools to the model, and the parser of its calls.

    Without a `parser`, calls stay text. `reason` is the reason for the choice of `prompt`.
    """

    prompt: PromptSource
    parser: str | None
    reason: str

    def to_dict(self) -> JsonObject:
        return asdict(self)

    def __str__(self) -> str:
        shown = {
            "template": "shown by the model's chat template",
            "default": "shown by the default tool prompt",
            "none": "refused",
        }
        parser = f"calls read by {self.parser}" if self.parser else "calls not read"
        return f"{shown[self.prompt]} ({self.reason}), {parser}"

    def check(self, endpoint: Endpoint, fields: JsonObject) -> None:
        """Raise `UnsupportedFieldError` for tools and calls, which no prompt can contain here."""
        if endpoint.pools:
            return
        path = "tools" if fields.get("tools") else _call_in(fields)
        if path is not None:
            raise UnsupportedFieldError(f"'{path}' is not supported: {self.reason}.", param=path)


NO_CALLS = ToolSupport("none", None, "the model generates no text")


def _call_in(fields: JsonObject) -> str | None:
    """Return the path of the first tool call or tool result in a conversation."""
    for name in ("messages", "input"):
        turns = fields.get(name)
        for index, turn in enumerate(turns if isinstance(turns, list) else ()):
            if not isinstance(turn, dict):
                continue
            path = f"{name}[{index}]"
            if turn.get("role") == "tool" or turn.get("type") in _CALLS:
                return path
            if turn.get("tool_calls"):
                return f"{path}.tool_calls"
            blocks = turn.get("content")
            for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
                if isinstance(block, dict) and block.get("type") in _CALLS:
                    return f"{path}.content[{number}]"
    return None


_SURROGATE = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    r"|(?P<lone>\\u[dD][89a-fA-F][\da-fA-F]{2})|\\.",
    re.DOTALL,
)
"""Escapes of JSON; `lone` is one half of a pair, which is no character."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Finish reason of the engine, and the stop string or token of the request that matched."""

    reason: str = "stop"
    matched: int | str | None = None

    @classmethod
    def of(cls, output: Any, request: Any) -> Ending:
        """Return the ending of a finished `CompletionOutput` for a request of vLLM."""
        matched = output.stop_reason
        # vLLM reports all but one of the model's own end tokens as stop tokens, too.
        stop_ids = getattr(request, "stop_token_ids", None) or ()
        if isinstance(matched, int) and matched not in stop_ids:
            matched = None
        return cls(output.finish_reason or "stop", matched)

    @property
    def is_cut(self) -> bool:
        """True if a limit, a stop string or a stop token, not the model, ended the answer."""
        return self.reason != "stop" or self.matched is not None


NATURAL = Ending()
"""The model ended its answer."""


def is_whole(arguments: str) -> bool:
    """Return whether generated arguments are complete JSON; empty ones are."""
    try:
        from_json(replace_halves(arguments) or "{}")
    except ValueError:
        return False
    return True


def finish_reason(ending: Ending, arguments: Sequence[str], *, named: bool) -> str:
    """Return the finish reason of a chat choice with the `arguments` of its tool calls.

    As OpenAI: `tool_calls` if every call is complete, `stop` if the request named the tool
    (`named`).
    """
    if ending.reason != "stop":
        return ending.reason
    complete = bool(arguments) and all(is_whole(text) for text in arguments)
    return "tool_calls" if complete and not named else "stop"


def replace_halves(text: str) -> str:
    """Return JSON in which each escape of half a surrogate pair is that of U+FFFD."""
    return _SURROGATE.sub(lambda match: r"\ufffd" if match["lone"] else match[0], text)
