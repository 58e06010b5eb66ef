"""Keywords that the grammar of a schema enforces, and places where it is narrower."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import TypedDict

from server.structured_outputs.constraint import Undeclared
from server.structured_outputs.rewriting.scalars.formats import FORMATS
from server.structured_outputs.schema_walk import Schema, every_schema

MAX_PLACES = 200
"""Most places of a schema that are described, in each list."""

_KEYWORDS = frozenset(
    (
        *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_NARROWED_FORMATS = FORMATS.keys() - {"uuid", "ipv4"}
"""Formats of which a part is generated; docs/structured_outputs.md has the form of each."""
_QUOTED = re.compile(r"'(\$?\w+)'")
_OPENING = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_TYPED = frozenset(("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if"))


class Place(TypedDict):
    """A schema in the document, by path, and the keywords that the grammar enforces there."""

    path: str
    keywords: list[str]


class Remark(TypedDict):
    """A statement on a place of the schema."""

    path: str
    reason: str


def enforced_places(root: Any, refused: Sequence[Remark]) -> list[Place]:
    """Return the keywords that are enforced, by place, without those that `refused` is about."""
    places = list[Place]()
    for path, schema in _sorted(root):
        left_out = {_subject(item["reason"]) for item in refused if item["path"] == path}
        found = [
            name
            for name in schema
            if name in _KEYWORDS - left_out and not _is_annotation(schema, name)
        ]
        if found:
            places.append({"path": path, "keywords": found})
    return places[:MAX_PLACES]


def narrowed_places(root: Any, undeclared: Undeclared) -> list[Remark]:
    """Return the places where the grammar allows less than the schema."""
    remarks: list[Remark] = []
    for path, schema in _sorted(root):
        for rule in _OMISSIONS if undeclared is Undeclared.OMIT else ():
            remarks += [{"path": path, "reason": reason} for reason in rule(schema)]
        for rule in _RULES:
            remarks += [{"path": path, "reason": reason} for reason in rule(schema)]
    return remarks[:MAX_PLACES]


def refused_places(left_out: Sequence[str]) -> list[Remark]:
    """Return the lines `path: reason` of a rewriting as remarks."""
    return [_remark(line) for line in left_out[:MAX_PLACES]]


def property_names(root: Any) -> list[str]:
    """Return the names of properties in a schema, which its texts may need."""
    names = dict.fromkeys(
        name
        for _, schema in _sorted(root)
        for keyword in ("properties", "required")
        for name in schema.get(keyword) or ()
        if isinstance(name, str)
    )
    return list(names)[:MAX_PLACES]


def _remark(line: str) -> Remark:
    path, _, reason = line.partition(": ")
    if not path.startswith("$") or not reason:
        # A limit of the whole schema.
        return {"path": "$", "reason": line}
    return {"path": path, "reason": reason}


def _subject(reason: str) -> str:
    """Return the first keyword that a reason names; the others are alternatives."""
    return next((name for name in _QUOTED.findall(reason) if name in _KEYWORDS), "")


def _sorted(root: Any) -> list[tuple[str, Schema]]:
    return sorted(every_schema(root), key=lambda item: item[0])


def _is_annotation(schema: Schema, name: str) -> bool:
    return name == "format" and schema[name] not in FORMATS


def _properties(schema: Schema) -> list[str]:
    if not isinstance(schema.get("properties"), dict) or not schema["properties"]:
        return []
    found = []
    if not any(name in schema for name in _OPENING):
        found.append("no other properties than the listed ones")
    if len(schema["properties"]) > 1:
        found.append("properties in the schema's order")
    return found


def _items(schema: Schema) -> list[str]:
    first = schema.get("prefixItems", schema.get("items"))
    rest = schema.get("items" if "prefixItems" in schema else "additionalItems")
    closed = isinstance(first, list) and rest is None
    return ["no other items than the listed first ones"] if closed else []


def _implied_type(schema: Schema) -> list[str]:
    constrains = any(name in _KEYWORDS for name in schema)
    return ["the types of its keywords only"] if constrains and not _TYPED & schema.keys() else []


def _number(schema: Schema) -> list[str]:
    types = schema.get("type")
    numeric = {"number", "integer"}.intersection(types if isinstance(types, list) else [types])
    return ["numbers without an exponent, at most 15 digits before the point and 9 after"] * bool(
        numeric
    )


def _format(schema: Schema) -> list[str]:
    name = schema.get("format")
    narrow = isinstance(name, str) and name in _NARROWED_FORMATS
    return [f"the common part of '{name}'"] if narrow else []


_Rule = Callable[[Schema], list[str]]
_OMISSIONS: tuple[_Rule, ...] = (_properties, _items, _implied_type)
_RULES: tuple[_Rule, ...] = (_number, _format)
