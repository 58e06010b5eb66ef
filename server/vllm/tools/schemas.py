"""Schemas of tools as they guide an answer."""

from __future__ import annotations

from typing import Any

_TYPING_KEYS = frozenset(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))
"""Keywords of a schema that say what a value is."""


def object_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object whatever it leaves out."""
    given = dict(parameters or {})
    if isinstance(given.get("type"), list):
        return {**given, "type": "object"}
    return given if _TYPING_KEYS & given.keys() else {"type": "object", **given}


def guiding(tool: Any, *, strict: bool = False) -> Any:
    """Return a copy of a tool whose schema is one of objects and is always followed.

    vLLM and xgrammar allow any JSON as arguments of a tool with `strict: false`. `strict` guides
    calls of a free choice as well.
    """
    function = getattr(tool, "function", tool)
    if not hasattr(function, "parameters"):
        return tool
    changes: dict[str, Any] = {"parameters": object_schema(function.parameters)}
    if strict:
        changes["strict"] = True
    elif function.strict is False:
        changes["strict"] = None
    changed = function.model_copy(update=changes)
    return changed if function is tool else tool.model_copy(update={"function": changed})
