"""Schemas as people write them: what a grammar follows, what is refused, what is hostile."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_NODE: Schema = {
    "type": "object",
    "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}
_CAT: Schema = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer", "maximum": 9}},
    "required": ["kind", "lives"],
    "additionalProperties": False,
}
_DOG: Schema = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "tricks": {"enum": ["sit", "roll"]}},
    "required": ["kind"],
    "additionalProperties": False,
}

GOOD: tuple[Schema, ...] = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 12},
    {"const": {"a": [1, "two", None]}},
    {"enum": ["red", "green", "blue"]},
    {"type": "string", "enum": ["a\tb", 'say "hi"', "ünï"]},
    {"type": "string", "minLength": 1, "maxLength": 8},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "pattern": "^\\+?[0-9 \\-]{6,10}$"},
    *({"type": "string", "format": name} for name in ("date", "uuid", "ipv4", "date-time")),
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": "integer", "multipleOf": 5, "description": "a title, a default", "default": 5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer", "maximum": 9}], "items": False},
    {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
    {"oneOf": [_CAT, _DOG], "discriminator": {"propertyName": "kind"}},
    {"anyOf": [_CAT, _DOG], "title": "Pet"},
    {"type": "object", "anyOf": [_CAT, _DOG]},
    {"allOf": [{"$ref": "#/definitions/cat"}], "definitions": {"cat": _CAT}},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "pet": _DOG},
        "required": ["name"],
        "additionalProperties": {"type": "boolean"},
    },
    {
        "type": "object",
        "patternProperties": {"^x-[a-z]$": {"type": "boolean"}},
        "maxProperties": 2,
        "additionalProperties": False,
    },
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "string", "format": "colour", "maxLength": 6},
    {"type": "string", "format": "ipv4", "maxLength": 9},
    {"type": "string", "pattern": "^a+$", "minLength": 3, "maxLength": 9},
    {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "dependentRequired": {"a": ["b"]},
        "minProperties": 1,
    },
    {"oneOf": [_CAT, {**_DOG, "required": []}]},
    {
        "type": "object",
        "oneOf": [{"required": ["a"]}, {"required": ["b", "c"]}],
        "properties": {name: {"type": "boolean"} for name in "abc"},
    },
    {
        "type": "object",
        "properties": {"k": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
        "required": ["k"],
        "if": {"properties": {"k": {"const": "a"}}},
        "then": {"required": ["n"]},
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]},
        ]
    },
    {"type": "string", "not": {"enum": ["", "no"]}, "maxLength": 4},
    {"type": "number", "multipleOf": 0.5, "minimum": -2, "maximum": 2},
    {"type": "object", "properties": {"a": True}, "required": ["a"], "maxProperties": 1},
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/step",
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"$ref": "#/$defs/s"}, "maxItems": 2},
            "final": {"type": "string", "maxLength": 6},
        },
        "required": ["steps", "final"],
        "additionalProperties": False,
        "$defs": {
            "s": {
                "type": "object",
                "properties": {"why": {"type": "string", "maxLength": 4}},
                "required": ["why"],
                "additionalProperties": False,
            }
        },
    },
)
"""A grammar follows them to the letter."""

# With a word of the reason.
BAD: tuple[tuple[Schema, str], ...] = (
    ({"type": "strin"}, "strin"),
    ({"type": "object", "properties": []}, "properties"),
    ({"type": "object", "required": "a"}, "required"),
    ({"type": "array", "not": {"uniqueItems": True}}, "'not' of 'uniqueItems'"),
    ({"type": "number", "not": {"multipleOf": 3}}, "'not' of 'multipleOf'"),
    ({"not": {"dependencies": {"a": ["b"]}}}, "'not' of 'dependentRequired'"),
    ({"not": {"type": "integer"}}, "other numbers"),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "contains": {"const": 5}}, "'contains'"),
    ({"type": "object", "minProperties": 2}, "'minProperties'"),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2},
        "'maxProperties'",
    ),
    ({"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "'unevaluatedProp"),
    ({"anyOf": [{"prefixItems": [{}]}], "unevaluatedItems": False}, "'unevaluatedItems'"),
    ({"propertyNames": {"not": {"const": "a"}}}, "'propertyNames'"),
    ({"if": {"pattern": "a"}, "then": {"minLength": 3}}, "'if' with 'pattern'"),
    ({"properties": {"a": {"enum": []}}, "required": ["a"]}, "Unsatisfiable"),
    ({"type": "string", "format": "ipv4", "maxLength": 3}, "Unsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ({"type": "string", "pattern": "(?=a)b"}, "a look-ahead"),
    ({"type": "string", "pattern": "^a+(?<!b)c"}, "a look-behind"),
    ({"type": "string", "pattern": "^(a)\\1$"}, "back reference"),
    ({"type": "string", "pattern": "(a"}, "regex"),
    ({"type": "string", "pattern": "^.*\\bword"}, "word boundary"),
    ({"type": "number", "multipleOf": 1e-12}, "'multipleOf'"),
    ({"type": "integer", "multipleOf": 3, "maximum": -6}, "negative"),
    ({"oneOf": [{"type": "string"}] * 2}, "Unsatisfiable"),
    ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "use 'anyOf'"),
    ({"oneOf": [True, True, True]}, "no value"),
    ({"$ref": "https://example.com/schema.json"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "leads nowhere"),
    ({"$ref": "#"}, "refers to itself"),
    ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, {}]}}}, "refers to itself"),
    ({"$dynamicRef": "#node", "type": "object"}, "'$dynamicRef'"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "finite"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 3"),
    (
        {"$schema": "http://json-schema.org/draft-04/schema#", "not": {"not": {"const": 1}}},
        "'const' is no keyword of the draft",
    ),
    (
        {
            "$id": "https://example.com/a",
            "properties": {"a": {"$id": "b", "properties": {"c": {"$ref": "#/$defs/d"}}}},
            "$defs": {"d": {"const": 1}},
        },
        "leads nowhere",
    ),
)
"""Refused, each for its own reason."""

# With a word of the reason.
BAD_IN_TAGS: tuple[tuple[Schema, str], ...] = (
    ({"type": "strin"}, "strin"),
    ({"type": "object", "properties": []}, "properties"),
    ({"type": "object", "required": "a"}, "required"),
    ({"not": {"type": "null"}}, "'not'"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "'if'"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "contains": {"const": 5}}, "'contains'"),
    ({"type": "object", "required": ["z"]}, "'z'"),
    ({"minLength": 3}, "'minLength' needs a 'type'"),
    ({"type": "integer", "enum": [1, "a"]}, "'a'"),
    ({"type": "string", "const": 1}, "1"),
    ({"enum": [1], "const": 1}, "'const'"),
    ({"type": "string", "format": "ipv4", "maxLength": 3}, "'maxLength'"),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, "'minLength'"),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
    ({"anyOf": [{"type": "string"}], "maxLength": 3}, "'maxLength' cannot stand beside"),
    ({"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {}}}, "'type' cannot stand beside"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "needs a 'type'"),
    ({"type": "object", "minProperties": 2, "additionalProperties": True}, "'minProperties'"),
    (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}},
        "'patternProperties'",
    ),
    ({"type": "object", "propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "Names"),
    ({"$ref": "https://example.com/schema.json"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "leads nowhere"),
    ({"$ref": "#"}, "refers to itself"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}}},
        "refers to itself",
    ),
    (
        {
            "type": "object",
            "properties": {"next": {"$ref": "#"}},
            "required": ["next"],
            "additionalProperties": False,
        },
        "finite",
    ),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "finite"),
)
"""Refused in a structural tag that goes to xgrammar, each for its own reason."""
