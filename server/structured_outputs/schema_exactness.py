"""Checks for schemas that xgrammar would not follow exactly, found by experiment.

Used for schemas of structural tags that go to xgrammar. A schema that passes, and of which
the compiler does not warn, is followed exactly. Check it again with every new xgrammar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.schema_walk import Schema, every_schema, resolve

_ABSENT = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef", "minContains", "maxContains"),
)
_FORMATS = frozenset(
    (
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    )
)
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": (
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
        "unevaluatedItems",
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
_ASSERTIONS = frozenset(("type", "enum", "const")).union(*_OF_TYPE.values())
_BRANCHES = ("anyOf", "oneOf", "allOf")


def check_exact(root: Any) -> None:
    """Raise `UnusableError` for the first part of a schema that the grammar would not follow."""
    if isinstance(root, bool):
        return
    for path, schema in every_schema(root):
        for rule in _RULES:
            if (reason := rule(root, path, schema)) is not None:
                raise UnusableError(f"{path}: {reason}")


def _absent(_root: Any, _path: str, schema: Schema) -> str | None:
    found = next((key for key in _ABSENT if key in schema), None)
    return None if found is None else f"the keyword '{found}' is not supported"


def _combined(root: Any, path: str, schema: Schema) -> str | None:
    """Refuse keywords beside a reference or a combination: the grammar ignores them."""
    chosen = [key for key in ("$ref", *_BRANCHES) if key in schema]
    if not chosen:
        return None
    if len(chosen) > 1:
        return f"'{chosen[0]}' and '{chosen[1]}' cannot be combined"
    others = sorted(_ASSERTIONS & schema.keys())
    if (
        others == ["type"]
        and chosen[0] != "$ref"
        and all(_has_type(root, path, item, schema["type"]) for item in schema[chosen[0]])
    ):
        return None
    return f"'{others[0]}' cannot stand beside '{chosen[0]}'" if others else None


def _has_type(root: Any, path: str, schema: Any, kind: Any) -> bool:
    """Return True if a branch has the type itself; follows one reference."""
    if isinstance(schema, dict) and "$ref" in schema:
        schema = resolve(root, schema["$ref"], path)
    if not isinstance(schema, dict):
        return False
    own = schema.get("type", "object" if "properties" in schema else None)
    return own is not None and own == kind


def _listed(_root: Any, _path: str, schema: Schema) -> str | None:
    """Refuse values of `enum` and `const` that fail the keywords beside them."""
    beside = {key: schema[key] for key in _ASSERTIONS & schema.keys() - {"enum", "const"}}
    if "enum" in schema and "const" in schema:
        return "'enum' and 'const' cannot be combined"
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values and beside:
        from jsonschema import Draft202012Validator

        validator = Draft202012Validator(beside)
        bad = next((value for value in values if not validator.is_valid(value)), None)
        if bad is not None or (None in values and not validator.is_valid(None)):
            return f"the value {bad!r} of 'enum' or 'const' fails the keywords beside it"
    return None


def _untyped(_root: Any, _path: str, schema: Schema) -> str | None:
    """Refuse keywords of one type without `type`: the grammar ignores them."""
    if {"type", "enum", "const", "$ref", *_BRANCHES} & schema.keys() or "properties" in schema:
        return None
    found = next((key for keys in _OF_TYPE.values() for key in keys if key in schema), None)
    return None if found is None else f"'{found}' needs a 'type' beside it"


def _number(_root: Any, _path: str, schema: Schema) -> str | None:
    types = schema.get("type")
    if "multipleOf" in schema and (types == "number" or isinstance(types, list)):
        return "'multipleOf' is supported for the type 'integer' alone"
    return None


def _string(_root: Any, _path: str, schema: Schema) -> str | None:
    asserted = schema.get("format") in _FORMATS
    has_length = "minLength" in schema or "maxLength" in schema
    if has_length and ("pattern" in schema or asserted):
        return "'minLength' and 'maxLength' cannot stand beside 'pattern' or 'format'"
    if "pattern" in schema and asserted:
        return "'pattern' cannot stand beside 'format'"
    return None


def _array(_root: Any, _path: str, schema: Schema) -> str | None:
    if schema.get("uniqueItems") is True and schema.get("maxItems", 2) > 1:
        return "'uniqueItems' is not supported"
    if "contains" in schema:
        return "the keyword 'contains' is not supported"
    return None


def _object(_root: Any, _path: str, schema: Schema) -> str | None:
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in properties:
            return f"the required property {name!r} is not in 'properties'"
    patterns = schema.get("patternProperties", {})
    if patterns and (properties or len(patterns) > 1):
        return "'patternProperties' takes one pattern, without 'properties' beside it"
    closed = schema.get("additionalProperties") is False
    names = "propertyNames" in schema
    if names and (properties or patterns or isinstance(schema.get("additionalProperties"), dict)):
        return "'propertyNames' cannot stand beside other keywords for properties"
    # The grammar may repeat a name that the schema does not list.
    listed_only = closed or (properties and schema.get("additionalProperties") is None)
    fewest = schema.get("minProperties", 0)
    if fewest > len(schema.get("required", ())) and not (listed_only and not patterns):
        return "'minProperties' needs that many required properties, or no others than listed"
    return None


_RULES: tuple[Callable[[Any, str, Schema], str | None], ...] = (
    *(_absent, _combined, _listed, _untyped, _number, _string, _array, _object),
)
