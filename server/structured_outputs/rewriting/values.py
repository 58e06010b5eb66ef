"""Values of `enum` and `const`: whether they satisfy schemas, and which are equal."""

from __future__ import annotations

import json
import re
from typing import Any

from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import (
    HAS,
    LATER,
    NOT_FORMATS,
    NOT_MULTIPLES,
    NOT_ONE_OF,
    NOT_PATTERNS,
    NOT_TYPES,
    SchemaDocument,
)
from server.structured_outputs.rewriting.scalars.formats import WIDE_FORMATS
from server.structured_outputs.rewriting.scalars.numbers import exact
from server.structured_outputs.schema_walk import Schema


def satisfies(document: SchemaDocument, value: Any, plain: Plain) -> bool:
    """Return True if a value satisfies schemas without combinations, internal keywords included."""
    return all(document.is_valid(value, item) and _passes(document, value, item) for item in plain)


def matches(pattern: str, text: str) -> tuple[bool, bool]:
    """Return whether the pattern matches by Python's `re`, and by ECMA-262.

    In ECMA-262, `\\w` and similar classes are ASCII, and `$` does not match before a line end.
    """
    ecma = f"{text[:-1]}\r" if text.endswith("\n") else text
    return bool(re.search(pattern, text)), bool(re.search(pattern, ecma, re.ASCII))


def same(one: Any, other: Any) -> bool:
    """Return True if two JSON values are equal: numbers by value, never equal to booleans."""
    return _canonical(one) == _canonical(other)


def _passes(document: SchemaDocument, value: Any, schema: Schema) -> bool:
    """Return True if the value passes the internal keywords of a schema."""
    if any(same(value, other) for other in schema.get(NOT_ONE_OF, ())):
        return False
    kind = _type_of(value)
    if kind in schema.get(NOT_TYPES, ()):
        return False
    if kind == "string":
        return not any(
            any(matches(pattern, value)) for pattern in schema.get(NOT_PATTERNS, ())
        ) and not any(
            re.fullmatch(WIDE_FORMATS[name], value) for name in schema.get(NOT_FORMATS, ())
        )
    if kind == "number":
        return all(exact(value) % exact(step) for step in schema.get(NOT_MULTIPLES, ()))
    if kind == "array":
        return all(
            any(fits(document, item, inner) for item in value[first:])
            for first, inner in schema.get(LATER, ())
        )
    if kind == "object":
        return all(_has(document, value, pair) for pair in schema.get(HAS, ()))
    return True


def _has(document: SchemaDocument, value: dict[str, Any], pair: list[Any]) -> bool:
    names, inner = pair
    return any(
        fits(document, name, names) and fits(document, part, inner) for name, part in value.items()
    )


def fits(document: SchemaDocument, value: Any, schema: Any) -> bool:
    """Return True if a value satisfies a schema, which may have internal keywords."""
    if isinstance(schema, bool):
        return schema
    return document.is_valid(value, schema) and _passes(document, value, schema)


def _canonical(value: Any) -> str:
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value))
        return f"{{{','.join(items)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(exact(value))
    return json.dumps(value)


def _type_of(value: Any) -> str:
    """Return the type of a JSON value, one of `VALUE_TYPES`."""
    if value is None:
        return "null"
    return next(name for kind, name in _NAMES.items() if isinstance(value, kind))


_NAMES: dict[type | tuple[type, ...], str] = {
    bool: "boolean",
    (int, float): "number",
    str: "string",
    list: "array",
    dict: "object",
}
