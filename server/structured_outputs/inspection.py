"""Checks of a constraint without compiling it: its size, its syntax, and what xgrammar follows.

Pure functions of the constraint's text. Hostile input may take them long, so that they run in a
trial process, never on the event loop. Schemas of structural tags go to xgrammar: one that passes
`check_exact`, which was found by experiment, and of which the compiler does not warn, is followed
exactly. Check it again with every new xgrammar.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from server.errors import json_type
from server.structured_outputs.constraint import (
    Constraint,
    ConstraintKind,
    SchemaLimits,
    UnusableError,
)
from server.structured_outputs.grammars import MARK, regex_grammar
from server.structured_outputs.normaliser import normalised
from server.structured_outputs.schema_document import Schema, every_schema, resolve


def check_size(schema: Any, limits: SchemaLimits) -> None:
    """Raise `UnusableError` if a schema or structural tag exceeds a limit."""
    stack: list[tuple[Any, int]] = [(schema, 1)]
    nodes = 0
    while stack:
        value, depth = stack.pop()
        nodes += 1
        if nodes > limits.max_nodes:
            raise UnusableError(
                f"it has more than {limits.max_nodes} objects, arrays and values, the limit of "
                "this server"
            )
        if not isinstance(value, dict | list):
            continue
        if depth > limits.max_depth:
            raise UnusableError(
                f"it is nested deeper than {limits.max_depth} levels, the limit of this server"
            )
        if isinstance(value, dict):
            _check_lengths(value, limits)
            value = list(value.values())
        stack += [(item, depth + 1) for item in value]


def check_pattern_length(pattern: str, what: str, limits: SchemaLimits) -> None:
    """Raise `UnusableError` if a regular expression is too long."""
    if len(pattern) > limits.max_pattern:
        raise UnusableError(
            f"{what} has {len(pattern)} characters; the limit of this server is "
            f"{limits.max_pattern}"
        )


def _check_lengths(schema: dict[str, Any], limits: SchemaLimits) -> None:
    if isinstance(enum := schema.get("enum"), list) and len(enum) > limits.max_enum:
        raise UnusableError(
            f"an enum has {len(enum)} values; the limit of this server is {limits.max_enum}"
        )
    if isinstance(pattern := schema.get("pattern"), str):
        check_pattern_length(pattern, "a pattern", limits)
    if isinstance(named := schema.get("patternProperties"), dict):
        for pattern in named:
            check_pattern_length(pattern, "a pattern of patternProperties", limits)


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


_MAX_DIGITS = 400
"""Characters of an integer; Python refuses to format thousands of digits."""


def inspect(constraint: Constraint, limits: SchemaLimits) -> Any:
    """Return the value of a schema or of a tag; None for other constraints.

    Raises `UnusableError` if the constraint is too large, malformed or not supported.
    """
    text = constraint.text
    if constraint.kind is ConstraintKind.REGEX:
        _check_regex(text, limits)
    elif constraint.kind is ConstraintKind.GRAMMAR:
        if not text.strip():
            raise UnusableError("it is empty")
        if not text.startswith(MARK):
            _check_escapes(text)
    elif constraint.kind is ConstraintKind.CHOICE:
        _check_choice(json.loads(text), limits)
    elif constraint.kind is ConstraintKind.JSON:
        schema = parsed(text)
        _check_schema(schema, limits)
        return schema
    else:
        tag = parsed(text)
        if not isinstance(tag, dict):
            raise UnusableError(f"it must be an object, got {json_type(tag)}")
        check_size(tag, limits)
        for schema in _schemas_of_tag(tag):
            _check_schema(schema, limits)
        return tag
    return None


def check_unrewritten(constraint: Constraint) -> None:
    """Raise `UnusableError` for a schema that xgrammar does not take.

    What an exact constraint has must be followed.
    """
    if constraint.kind is ConstraintKind.JSON:
        schemas = [parsed(constraint.text)]
    elif constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        schemas = list(_schemas_of_tag(parsed(constraint.text)))
    else:
        return
    for schema in schemas:
        # Refuses malformed schemas, and those that refer to themselves.
        normalised(schema, closed=False)
        if constraint.exact:
            check_exact(schema)


def parsed(text: str) -> Any:
    """Return the JSON value of `text`. Raises `UnusableError`."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite, parse_int=_short)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnusableError("it has half of a surrogate pair, which UTF-8 cannot hold") from None
    except ValueError as error:
        raise UnusableError(f"it is not valid JSON: {error}") from None
    except RecursionError:
        raise UnusableError("it is nested too deeply to be read") from None
    return value


def _short(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer has more than {_MAX_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is beyond what a double holds")
    return value


def _check_regex(pattern: str, limits: SchemaLimits) -> None:
    if not pattern:
        raise UnusableError("it is empty")
    if "\0" in pattern:
        raise UnusableError("it has a NUL character")
    check_pattern_length(pattern, "it", limits)


_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]+)|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
"""An escape of EBNF, with its code point."""


def _check_escapes(grammar: str) -> None:
    """Raise `UnusableError` for an escape of EBNF that UTF-8 cannot hold."""
    for found in _ESCAPE.finditer(grammar):
        code = int(found[found.lastindex], 16) if found.lastindex else 0
        if code in range(0xD800, 0xE000) or code > sys.maxunicode:
            raise UnusableError(
                f"the escape '{found[0][:20]}' at character {found.start() + 1} is half of a "
                "surrogate pair or no character"
            )


def _check_choice(choices: list[str], limits: SchemaLimits) -> None:
    if not choices:
        raise UnusableError("it has no values")
    if len(choices) > limits.max_enum:
        raise UnusableError(
            f"it has {len(choices)} values; the limit of this server is {limits.max_enum}"
        )


def _check_schema(schema: Any, limits: SchemaLimits) -> None:
    if not isinstance(schema, dict | bool):
        raise UnusableError(f"it must be an object, got {json_type(schema)}")
    check_size(schema, limits)


def _schemas_of_tag(tag: Any) -> Iterator[Any]:
    """Yield the JSON schemas in a structural tag of either form.

    Raises `UnusableError` for a regex or a grammar that is read differently.
    """
    stack = [tag]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            if value.get("type") == "json_schema" and "json_schema" in value:
                yield value["json_schema"]
            elif {"begin", "schema", "end"} <= value.keys():
                yield value["schema"]
            elif value.get("type") == "regex" and isinstance(value.get("pattern"), str):
                regex_grammar(value["pattern"])
            elif value.get("type") == "grammar" and isinstance(value.get("grammar"), str):
                _check_escapes(value["grammar"])
            else:
                stack += value.values()
