"""Instances without their undeclared properties."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.schema_resources import localized
from server.structured_outputs.schema_walk import Schema, applied_here, resolve


def without_undeclared(root: Any, value: Any) -> Any:
    """Return an instance without the properties that no schema of their object names.

    Objects whose schemas list no properties stay as they are.
    """
    try:
        root = localized(root)
        return _declared(root, [root], value)
    except UnusableError:
        return value


def _declared(root: Any, schemas: Sequence[Any], value: Any) -> Any:
    applied = _applied(root, schemas)
    if isinstance(value, list):
        return [_declared(root, _of_item(applied, n), item) for n, item in enumerate(value)]
    if not isinstance(value, dict) or not any("properties" in item for item in applied):
        return value
    parts = {name: _of_property(applied, name) for name in value}
    return {name: _declared(root, parts[name], value[name]) for name in value if parts[name]}


def _applied(root: Any, schemas: Sequence[Any]) -> list[Schema]:
    """Return the schemas that may apply to the value of `schemas`, through references, too."""
    found: list[Schema] = []
    waiting = list(schemas)
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict) or any(schema is other for other in found):
            continue
        found.append(schema)
        waiting += [item for _, item in applied_here(schema, "$")]
        waiting += [resolve(root, schema["$ref"], "$")] if "$ref" in schema else []
    return found


def _of_property(applied: Sequence[Schema], name: str) -> list[Any]:
    """Return the schemas of a property; none if it is undeclared."""
    found = []
    for schema in applied:
        if name in schema.get("properties", {}):
            found.append(schema["properties"][name])
        found += [
            inner
            for pattern, inner in schema.get("patternProperties", {}).items()
            if re.search(pattern, name)
        ]
        if schema.get("additionalProperties"):
            found.append(schema["additionalProperties"])
    return found


def _of_item(applied: Sequence[Schema], index: int) -> list[Any]:
    found = []
    for schema in applied:
        items = schema.get("items")
        listed = items if isinstance(items, list) else schema.get("prefixItems", [])
        if index < len(listed):
            found.append(listed[index])
        elif not isinstance(items, list):
            found.append(items)
    return found
