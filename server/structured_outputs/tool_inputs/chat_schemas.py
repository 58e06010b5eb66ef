"""JSON schemas of custom tools in chats, which vLLM's models lack, for the OpenAPI document."""

from __future__ import annotations

from server.structured_outputs.tool_inputs.custom_tools import KIND
from server.structured_outputs.tool_inputs.input_grammar import SYNTAXES
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
_GRAMMAR: JsonObject = {
    "type": "object",
    "properties": {"syntax": {"enum": list(SYNTAXES)}, "definition": _TEXT},
    "required": ["syntax", "definition"],
}
_FORMAT: JsonObject = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "grammar"]}, "grammar": _GRAMMAR},
    "required": ["type"],
}

TOOL_SCHEMA = _custom(
    "A tool with a text as its input, which a grammar may guide.",
    {"name": _TEXT, "description": _TEXT, "format": _FORMAT},
    "name",
)
CHOICE_SCHEMA = _custom("The custom tool that must be called.", {"name": _TEXT}, "name")
CALL_SCHEMA = _custom("A call of a custom tool.", {"name": _TEXT, "input": _TEXT}, "name", "input")
CALL_SCHEMA["properties"]["id"] = _TEXT
