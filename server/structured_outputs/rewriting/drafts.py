"""Older drafts of JSON Schema in the keywords of 2020-12."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.structured_outputs.schema_walk import Schema, rebuilt

_REFERENCE_ALONE = ("draft-03", "draft-04", "draft-06", "draft-07")
_KEPT = ("$ref", "definitions", "$defs", "$schema", "title", "description")


def modern(root: Any) -> Any:
    """Return the schema with today's keywords; what `$schema` names tells the draft.

    In drafts up to 7 nothing beside a `$ref` is looked at (draft-07 Core, 8.3).
    """
    named = root.get("$schema") if isinstance(root, dict) else None
    alone = isinstance(named, str) and any(draft in named for draft in _REFERENCE_ALONE)
    return rebuilt(root, _reference_alone if alone else _today)


def _reference_alone(schema: Schema) -> Schema:
    if "$ref" in schema:
        return {key: value for key, value in schema.items() if key in _KEPT}
    return _today(schema)


def _today(schema: Schema) -> Schema:
    for applies, change in _CHANGES:
        if applies(schema):
            schema = change(dict(schema))
    return schema


def _tuple(schema: Schema) -> Schema:
    schema["prefixItems"] = schema.pop("items")
    if "additionalItems" in schema:
        schema["items"] = schema.pop("additionalItems")
    return schema


def _list_alone(schema: Schema) -> Schema:
    # Without a list of schemas in 'items' it says nothing.
    del schema["additionalItems"]
    return schema


def _dependencies(schema: Schema) -> Schema:
    given = schema.pop("dependencies")
    for key, kind in (("dependentRequired", list), ("dependentSchemas", dict | bool)):
        found = {name: value for name, value in given.items() if isinstance(value, kind)}
        if found:
            schema[key] = {**schema.get(key, {}), **found}
    return schema


def _exclusive(schema: Schema) -> Schema:
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool):
            excludes = schema.pop(exclusive)
            if excludes and bound in schema:
                schema[exclusive] = schema.pop(bound)
    return schema


_CHANGES: tuple[tuple[Callable[[Schema], bool], Callable[[Schema], Schema]], ...] = (
    (lambda s: isinstance(s.get("items"), list), _tuple),
    (lambda s: "additionalItems" in s, _list_alone),
    (lambda s: isinstance(s.get("dependencies"), dict), _dependencies),
    (
        lambda s: (
            isinstance(s.get("exclusiveMinimum"), bool)
            or isinstance(s.get("exclusiveMaximum"), bool)
        ),
        _exclusive,
    ),
)
