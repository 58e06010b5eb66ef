"""JSON schemas of custom tools in chats, which vLLM's models lack, for the OpenAPI document."""

from __future__ import annotations

from server.structured_outputs.tool_inputs.custom_tools import KIND
from server.wire.endpoint import JsonObject


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
