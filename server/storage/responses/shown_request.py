"""Request fields that a response repeats, with OpenAI's names and defaults."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json, to_json

from server.errors import InvalidTypeError, describe
from server.wire.endpoint import JsonObject

_AS_SENT: JsonObject = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "user")),
    **dict.fromkeys(("previous_response_id", "prompt_cache_key", "safety_identifier")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
    "background": False,
}
"""Default values of fields; a null also means the default."""
_SAMPLING: JsonObject = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_REASONING: JsonObject = {"effort": None, "summary": None}
_FUNCTION: JsonObject = {"description": None, "parameters": None, "strict": None}
_SCHEMA_FORMAT: JsonObject = {"description": None, "strict": False}
_SAFETY_IDENTIFIER = "safety_identifier"


def shown_request(body: JsonObject, sampling: JsonObject) -> JsonObject:
    """Return a copy of the request fields that a response repeats.

    `sampling` has the default sampling parameters of the model. Invalid values are copied as well,
    since a later check rejects the request. Raises `InvalidTypeError` for a `safety_identifier`
    that is no string, which no other code checks.
    """
    label = body.get(_SAFETY_IDENTIFIER)
    if label is not None and not isinstance(label, str):
        raise InvalidTypeError(
            f"'{_SAFETY_IDENTIFIER}' must be a string, got {describe(label)}.",
            param=_SAFETY_IDENTIFIER,
        )
    defaults = _AS_SENT | _SAMPLING | {k: v for k, v in sampling.items() if k in _SAMPLING}
    shown = {name: _given(body, name, default) for name, default in defaults.items()}
    shown["reasoning"] = {**_REASONING, **_object(body.get("reasoning"))}
    shown["text"] = _text(_object(body.get("text")))
    tools = body.get("tools")
    shown["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else []
    copied: JsonObject = from_json(to_json(shown))
    return copied


def _given(body: JsonObject, name: str, default: Any) -> Any:
    value = body.get(name)
    return default if value is None else value


def _object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _text(given: JsonObject) -> JsonObject:
    form = _object(given.get("format")) or {"type": "text"}
    if form.get("type") == "json_schema":
        sent = {name: value for name, value in form.items() if value is not None}
        form = {**_SCHEMA_FORMAT, **sent}
    return {**given, "format": form}


def _tool(tool: Any) -> Any:
    is_function = isinstance(tool, dict) and tool.get("type") == "function"
    return {**_FUNCTION, **tool} if is_function else tool
