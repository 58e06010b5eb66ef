"""Negation of a schema as a union of positive schemas.

A value fails a schema if it fails one of its keywords. Keywords accept all values of other types,
so that each part of the negation names its type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from server.structured_outputs.rewriting.document import (
    HAS,
    LATER,
    NEGATIVE,
    NOT_FORMATS,
    NOT_MULTIPLES,
    NOT_ONE_OF,
    NOT_PATTERNS,
    InexactError,
    SchemaDocument,
)
from server.structured_outputs.rewriting.scalars.formats import FORMATS, WIDE_FORMATS
from server.structured_outputs.schema_walk import Schema, applied_here

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
"""Types of JSON Schema; integers are numbers."""
VALUE_TYPES = tuple(name for name in TYPES if name != "integer")
"""Disjoint types of JSON values."""
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties"),
    ),
}
"""Keywords by the type of the values that they constrain."""


def negations(document: SchemaDocument, schema: Any) -> list[Any]:
    """Return schemas whose union is the negation. Raises `InexactError` if it has no rewriting."""
    if isinstance(schema, bool):
        return [] if schema else [True]
    found: list[Any] = []
    for keyword in schema:
        if keyword in _INEXACT and not _says_nothing(keyword, schema[keyword]):
            raise InexactError(
                f"'not' of {keyword!r} has no rewriting, nor 'if' and 'oneOf' where they negate "
                "it; list the allowed values or types instead"
            )
        if keyword in _RULES:
            found += _RULES[keyword](document, schema)
    return found


def says_nothing_of(document: SchemaDocument, schema: Any, kind: str) -> bool:
    """Return True if all values of the type `kind` satisfy the schema; may miss some schemas.

    `kind` is one of `VALUE_TYPES`.
    """
    if isinstance(schema, bool):
        return schema
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if kind not in named:
            return False
    if any(keyword in schema for keyword in (*OF_TYPE.get(kind, ()), *_DEPENDING.get(kind, ()))):
        return False
    if any(keyword in schema for keyword in ("enum", "const", "anyOf", "oneOf", "not", "if")):
        return False
    parts = [document.target(schema)] if "$ref" in schema else []
    return all(says_nothing_of(document, part, kind) for part in [*parts, *schema.get("allOf", ())])


def absent(name: str) -> Schema:
    """Return the schema of objects without the property."""
    return _object(properties={name: False})


def _object(**keywords: Any) -> Schema:
    # The listed names do not exclude others.
    return {"type": "object", **keywords, "additionalProperties": True, NEGATIVE: True}


def _type(_document: SchemaDocument, schema: Schema) -> list[Any]:
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    fractions = "integer" in named and "number" not in named
    others = [
        name for name in VALUE_TYPES if name not in named and not (fractions and name == "number")
    ]
    found: list[Any] = [{"type": others}] if others else []
    return [*found, {"type": "number", NOT_MULTIPLES: [1]}] if fractions else found


def _enum(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return _other_values(schema["enum"])


def _const(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return _other_values([schema["const"]])


def _other_values(values: list[Any]) -> list[Any]:
    """Return schemas of all values except these."""
    scalars = [value for value in values if not isinstance(value, list | dict)]
    containers = [{"anyOf": _other_than(v)} for v in values if isinstance(v, list | dict)]
    return (
        [{"allOf": [{NOT_ONE_OF: scalars}, *containers]}] if containers else [{NOT_ONE_OF: scalars}]
    )


def _other_than(value: list[Any] | dict[str, Any]) -> list[Any]:
    if isinstance(value, list):
        size = len(value)
        return [
            {"type": [name for name in VALUE_TYPES if name != "array"]},
            *([{"type": "array", "maxItems": size - 1}] if size else []),
            {"type": "array", "minItems": size + 1},
            *(_item_not(index, {"const": item}) for index, item in enumerate(value)),
        ]
    return [
        {"type": [name for name in VALUE_TYPES if name != "object"]},
        *map(absent, value),
        *(_property_not(name, {"const": item}) for name, item in value.items()),
        _object(**{HAS: [[{"type": "string", NOT_ONE_OF: sorted(value)}, True]]}),
    ]


def _item_not(index: int, inner: Any) -> Schema:
    """Return the schema of arrays whose item at the index fails a schema."""
    first = [*[True] * index, {"not": inner}]
    return {"type": "array", "prefixItems": first, "items": True, "minItems": index + 1}


def _property_not(name: str, inner: Any) -> Schema:
    """Return the schema of objects whose property fails a schema."""
    return _object(required=[name], properties={name: {"not": inner}})


def _properties(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [
        _property_not(name, inner)
        for name, inner in schema["properties"].items()
        if inner not in (True, {})
    ]


def _required(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [absent(name) for name in schema["required"]]


def _items(_document: SchemaDocument, schema: Schema) -> list[Any]:
    inner = schema["items"]
    if inner in (True, {}):
        return []
    first = len(schema.get("prefixItems", ()))
    if inner is False:
        return [{"type": "array", "minItems": first + 1}]
    if first:
        return [{"type": "array", "items": True, LATER: [[first, {"not": inner}]]}]
    return [{"type": "array", "contains": {"not": inner}}]


def _prefix_items(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [
        _item_not(index, inner)
        for index, inner in enumerate(schema["prefixItems"])
        if inner not in (True, {})
    ]


def _contains(_document: SchemaDocument, schema: Schema) -> list[Any]:
    inner, least = schema["contains"], int(schema.get("minContains", 1))
    fewer = {"type": "array", "contains": inner, "minContains": 0, "maxContains": least - 1}
    found: list[Any] = [] if least == 0 else [fewer]
    if least == 1:
        found = [{"type": "array", "items": {"not": inner}}]
    if "maxContains" in schema:
        more = int(schema["maxContains"]) + 1
        found.append({"type": "array", "contains": inner, "minContains": more})
    return found


def _pattern(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [{"type": "string", NOT_PATTERNS: [schema["pattern"]]}]


def _format(_document: SchemaDocument, schema: Schema) -> list[Any]:
    name = schema["format"]
    if name not in FORMATS:
        return []
    if name not in WIDE_FORMATS:
        raise InexactError(f"'not' of the format {name!r} has no rewriting")
    return [{"type": "string", NOT_FORMATS: [name]}]


def _multiple_of(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [{"type": "number", NOT_MULTIPLES: [schema["multipleOf"]]}]


def _additional(_document: SchemaDocument, schema: Schema) -> list[Any]:
    inner = schema["additionalProperties"]
    if inner in (True, {}):
        return []
    return [_with_other_name([schema], {"not": inner})]


def _unevaluated_properties(document: SchemaDocument, schema: Schema) -> list[Any]:
    inner = schema["unevaluatedProperties"]
    if inner in (True, {}):
        return []
    applied = applied_with(document, schema)
    if any("additionalProperties" in item for item in applied):
        raise _inexact_beside("unevaluatedProperties", "additionalProperties")
    if any("unevaluatedProperties" in item for item in applied[1:]):
        raise _inexact_beside("unevaluatedProperties", "unevaluatedProperties")
    return [_with_other_name(applied, {"not": inner})]


def _with_other_name(schemas: Sequence[Schema], value: Schema) -> Schema:
    """Return a schema of objects with a property of `value` that none of `schemas` names."""
    names = {
        "type": "string",
        NOT_ONE_OF: sorted({name for item in schemas for name in item.get("properties", ())}),
        NOT_PATTERNS: sorted({p for item in schemas for p in item.get("patternProperties", ())}),
    }
    return _object(**{HAS: [[names, value]]})


def _unevaluated_items(document: SchemaDocument, schema: Schema) -> list[Any]:
    inner = schema["unevaluatedItems"]
    if inner in (True, {}):
        return []
    applied = applied_with(document, schema)
    if any("items" in item for item in applied):
        raise _inexact_beside("unevaluatedItems", "items")
    if any("unevaluatedItems" in item for item in applied[1:]):
        raise _inexact_beside("unevaluatedItems", "unevaluatedItems")
    first = max(len(item.get("prefixItems", ())) for item in applied)
    fails = [{"not": item["contains"]} for item in applied if "contains" in item]
    found = {"allOf": [{"not": inner}, *fails]}
    return [{"type": "array", "items": True, LATER: [[first, found]]}]


def _inexact_beside(keyword: str, other: str) -> InexactError:
    return InexactError(f"'not' of {keyword!r} together with {other!r} has no rewriting")


def applied_with(document: SchemaDocument, schema: Schema) -> list[Schema]:
    """Return a schema and those that may apply to the same value, through references, too.

    All that they evaluate counts as evaluated, so that a negation excludes more than it must.
    """
    found: list[Schema] = []
    waiting: list[Any] = [schema]
    while waiting:
        item = waiting.pop(0)
        if not isinstance(item, dict) or any(item is other for other in found):
            continue
        if "$dynamicRef" in item:
            raise InexactError("'not' of an unevaluated part beside '$dynamicRef' has no rewriting")
        found.append(item)
        waiting += [inner for _, inner in applied_here(item, "")]
        waiting += [document.target(item)] if "$ref" in item else []
    return found


def _pattern_properties(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [
        _object(**{HAS: [[{"type": "string", "pattern": pattern}, {"not": inner}]]})
        for pattern, inner in schema["patternProperties"].items()
        if inner not in (True, {})
    ]


def _property_names(_document: SchemaDocument, schema: Schema) -> list[Any]:
    names = {"type": "string", "not": schema["propertyNames"]}
    return [_object(**{HAS: [[names, True]]})]


def _dependent_schemas(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [
        _object(required=[name], allOf=[{"not": inner}])
        for name, inner in schema["dependentSchemas"].items()
    ]


def _dependent(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [
        _object(required=[name], properties={other: False})
        for name, others in schema["dependentRequired"].items()
        for other in others
    ]


def _ref(document: SchemaDocument, schema: Schema) -> list[Any]:
    return negations(document, document.target(schema))


def _not(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [schema["not"]]


def _all_of(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [{"not": item} for item in schema["allOf"]]


def _any_of(_document: SchemaDocument, schema: Schema) -> list[Any]:
    return [{"allOf": [{"not": item} for item in schema["anyOf"]]}]


def _one_of(_document: SchemaDocument, schema: Schema) -> list[Any]:
    pairs = [{"allOf": list(pair)} for pair in combinations(schema["oneOf"], 2)]
    return [{"allOf": [{"not": item} for item in schema["oneOf"]]}, *pairs]


def _if(_document: SchemaDocument, schema: Schema) -> list[Any]:
    condition = schema["if"]
    return [
        {"allOf": [condition, {"not": schema.get("then", True)}]},
        {"allOf": [{"not": condition}, {"not": schema.get("else", True)}]},
    ]


def _bound(kind: str, keyword: str, other: str, step: int) -> Callable[..., list[Any]]:
    def rule(_document: SchemaDocument, schema: Schema) -> list[Any]:
        bound = schema[keyword] + step
        return [] if step and bound < 0 else [{"type": kind, other: bound}]

    return rule


_RULES: dict[str, Callable[[SchemaDocument, Schema], list[Any]]] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "properties": _properties,
    "required": _required,
    "items": _items,
    "prefixItems": _prefix_items,
    "pattern": _pattern,
    "format": _format,
    "multipleOf": _multiple_of,
    "additionalProperties": _additional,
    "patternProperties": _pattern_properties,
    "propertyNames": _property_names,
    "dependentSchemas": _dependent_schemas,
    "contains": _contains,
    "dependentRequired": _dependent,
    "$ref": _ref,
    "unevaluatedProperties": _unevaluated_properties,
    "unevaluatedItems": _unevaluated_items,
    "not": _not,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "if": _if,
    "minimum": _bound("number", "minimum", "exclusiveMaximum", 0),
    "maximum": _bound("number", "maximum", "exclusiveMinimum", 0),
    "exclusiveMinimum": _bound("number", "exclusiveMinimum", "maximum", 0),
    "exclusiveMaximum": _bound("number", "exclusiveMaximum", "minimum", 0),
    "minLength": _bound("string", "minLength", "maxLength", -1),
    "maxLength": _bound("string", "maxLength", "minLength", 1),
    "minItems": _bound("array", "minItems", "maxItems", -1),
    "maxItems": _bound("array", "maxItems", "minItems", 1),
    "minProperties": _bound("object", "minProperties", "maxProperties", -1),
    "maxProperties": _bound("object", "maxProperties", "minProperties", 1),
}
_INEXACT = frozenset((*("uniqueItems", "dependencies", "$dynamicRef"),))


_DEPENDING = {
    "array": ("unevaluatedItems",),
    "object": ("dependentRequired", "dependentSchemas", "unevaluatedProperties"),
}


def _says_nothing(keyword: str, value: Any) -> bool:
    if keyword == "uniqueItems":
        return value is False
    return value is True or value in ({}, [])
