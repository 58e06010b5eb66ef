"""Tools that an answer may or must call: `tool_choice` in the forms of all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from server.errors import InvalidValueError, MissingFieldError, describe
from server.wire.endpoint import Endpoint, JsonObject

FIELD = "tool_choice"
_ALLOWED = "allowed_tools"
_FORCING = frozenset(("required", "any"))
_NAMING = frozenset(("function", "tool"))
_MODES = ("auto", "required")
_CALLING = frozenset(
    (
        *(Endpoint.CHAT, Endpoint.RENDER_CHAT, Endpoint.RESPONSES),
        *(Endpoint.INPUT_TOKENS, Endpoint.MESSAGES),
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
            name = _name_of(value)
            return cls("required", None if name is None else frozenset((name,)))
        if kind == _ALLOWED:
            holder = get_field(value, _ALLOWED) or value
            tools = get_field(holder, "tools")
            names = map(_name_of, tools if isinstance(tools, list) else ())
            mode = "required" if get_field(holder, "mode") == "required" else "auto"
            return cls(mode, frozenset(filter(None, names)), listed=True)
        return cls()

    @property
    def forces(self) -> bool:
        """True if a tool must be called."""
        return self.mode == "required"

    def allows(self, name: object) -> bool:
        """Return whether the tool `name` may be called."""
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
        _check_allowed(endpoint, value, offered)
    elif kind in _NAMING and _name_of(value) is not None:
        path = f"{FIELD}.function.name" if get_field(value, "function") else f"{FIELD}.name"
        _check_name(_name_of(value), path, offered)


def _check_allowed(endpoint: Endpoint, value: Any, offered: list[str]) -> None:
    holder, path = value, FIELD
    if endpoint.chats:
        path = f"{FIELD}.{_ALLOWED}"
        holder = _require(value, _ALLOWED, path)
    mode = _require(holder, "mode", f"{path}.mode")
    if mode not in _MODES:
        raise InvalidValueError(
            f"'{path}.mode' must be 'auto' or 'required', got {describe(mode)}.",
            param=f"{path}.mode",
        )
    tools = _require(holder, "tools", f"{path}.tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidValueError(
            f"'{path}.tools' must be an array of at least one tool, got {describe(tools)}.",
            param=f"{path}.tools",
        )
    for index, tool in enumerate(tools):
        place = f"{path}.tools[{index}]"
        if get_field(tool, "type") != "function":
            raise InvalidValueError(
                f"'{place}.type' must be 'function' or 'custom', got "
                f"{describe(get_field(tool, 'type'))}.",
                param=f"{place}.type",
            )
        if endpoint.chats:
            tool, place = _require(tool, "function", f"{place}.function"), f"{place}.function"
        _check_name(_require(tool, "name", f"{place}.name"), f"{place}.name", offered)


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
        name = _name_of(tool)
        if name is not None and get_field(tool, "type") != "namespace":
            yield name
        for inner in _names(get_field(tool, "tools")):
            yield from (inner, f"{name}__{inner}")


def _name_of(tool: Any) -> str | None:
    name = get_field(get_field(tool, "function"), "name") or get_field(tool, "name")
    return name if isinstance(name, str) else None


def _require(value: Any, name: str, path: str) -> Any:
    found = get_field(value, name)
    if found is None:
        raise MissingFieldError(f"The field '{path}' is missing.", param=path)
    return found


def get_field(value: object, name: str) -> Any:
    """Return a field of an object; None if it is missing or `value` is no object."""
    return value.get(name) if isinstance(value, dict) else None
