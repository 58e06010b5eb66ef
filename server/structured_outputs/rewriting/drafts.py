"""Translation of older drafts of JSON Schema to the keywords of 2020-12."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from server.structured_outputs.schema_walk import Schema, every_schema, names_within, rebuilt

_OLDER = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}
"""Drafts by a part of `$schema`; any other is 2020-12."""
_LATEST = 2020
REFERENCE_ALONE = (4, 6, 7)
"""Drafts that ignore keywords beside `$ref`."""
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    "if": 7,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), 2019),
    "prefixItems": 2020,
}
_KEPT = ("$ref", "definitions", "$defs", "title", "description")
_NAMES = ("$schema", "$id")


def draft_of(root: Any) -> int:
    """Return the number or year of a schema's draft."""
    named = root.get("$schema") if isinstance(root, dict) else None
    found = (draft for part, draft in _OLDER.items() if isinstance(named, str) and part in named)
    return next(found, _LATEST)


def newer_keywords(root: Any) -> Iterator[str]:
    """Yield a line for each keyword that the schema's draft does not have."""
    draft = draft_of(root)
    newer = [keyword for keyword, since in _SINCE.items() if since > draft]
    if newer:
        names = names_within(root)
        newer = [keyword for keyword in newer if keyword in names]
    for path, schema in every_schema(root) if newer else ():
        if draft in REFERENCE_ALONE and "$ref" in schema:
            continue
        for keyword in newer:
            if keyword in schema:
                yield (
                    f"{path}: {keyword!r} is no keyword of the draft that '$schema' names, "
                    f"{root['$schema']}; name a newer one or leave '$schema' out"
                )


def modern(root: Any) -> Any:
    """Return the schema with the keywords of 2020-12, and without those that its draft lacks.

    In drafts up to 7, keywords beside `$ref` are ignored (draft-07 Core, 8.3). `$id` is dropped:
    `localized` has replaced the references that depend on one.
    """
    draft = draft_of(root)
    dropped = {*_NAMES, *(keyword for keyword, since in _SINCE.items() if since > draft)}

    def change(schema: Schema) -> Schema:
        if "$ref" in schema and draft in REFERENCE_ALONE:
            return {key: value for key, value in schema.items() if key in _KEPT}
        known = {key: value for key, value in schema.items() if key not in dropped}
        return _translated(known, draft)

    return rebuilt(root, change)


def _translated(schema: Schema, draft: int) -> Schema:
    for applies, alter in _CHANGES:
        if applies(schema):
            schema = alter(dict(schema))
    if draft <= 7 and isinstance(schema.get("dependencies"), dict):
        schema = with_dependencies(schema)
    return schema


def _tuple(schema: Schema) -> Schema:
    schema["prefixItems"] = schema.pop("items")
    if "additionalItems" in schema:
        schema["items"] = schema.pop("additionalItems")
    return schema


def _list_alone(schema: Schema) -> Schema:
    # It has no effect unless 'items' is a list.
    del schema["additionalItems"]
    return schema


def with_dependencies(schema: Schema) -> Schema:
    """Return the schema with `dependencies` split into the two keywords of 2019-09."""
    schema = dict(schema)
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
    (
        lambda s: (
            isinstance(s.get("exclusiveMinimum"), bool)
            or isinstance(s.get("exclusiveMaximum"), bool)
        ),
        _exclusive,
    ),
)
