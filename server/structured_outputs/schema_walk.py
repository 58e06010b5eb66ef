"""Traversal of JSON schemas: keywords that hold schemas, and references."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from server.structured_outputs.constraint import UnusableError

Schema = dict[str, Any]

Steps = tuple[str | int, ...]
"""Keys from a schema to a part of it."""

_ONE = frozenset(
    (
        *("not", "if", "then", "else", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "items", "additionalItems", "unevaluatedItems", "contains"),
    )
)
_MANY = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_NAMED = frozenset(
    (
        *("dependentSchemas", "dependencies", "properties", "patternProperties"),
        *("$defs", "definitions"),
    )
)


def names_within(root: Any) -> set[str]:
    """Return the keys of all objects in a JSON value; a superset of a schema's keywords."""
    names: set[str] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            names.update(value)
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return names


def every_schema(root: Any) -> Iterator[tuple[str, Schema]]:
    """Yield the path and the schema of each schema object in the document, once."""
    stack: list[tuple[str, Any]] = [("$", root)]
    while stack:
        path, schema = stack.pop()
        if isinstance(schema, dict):
            yield path, schema
            stack += [(_joined(path, steps), item) for steps, item in children(schema)]


def children(schema: Schema) -> Iterator[tuple[Steps, Schema]]:
    """Yield the schemas directly in a schema that are objects, each with its keys."""
    for key, value in schema.items():
        parts: Iterable[tuple[Steps, Any]] = ()
        if isinstance(value, dict):
            if key in _NAMED:
                parts = (((key, name), item) for name, item in value.items())
            elif key in _ONE:
                parts = [((key,), value)]
        elif isinstance(value, list) and key in _MANY:
            parts = (((key, index), item) for index, item in enumerate(value))
        yield from ((steps, item) for steps, item in parts if isinstance(item, dict))


def _joined(path: str, steps: Steps) -> str:
    if len(steps) == 1:
        return f"{path}.{steps[0]}"
    key, inner = steps
    return f"{path}.{key}[{inner}]" if isinstance(inner, int) else f"{path}.{key}.{inner}"


def followed(here: Any, steps: Iterable[str]) -> tuple[Steps, Any] | None:
    """Return the keys along the steps of a JSON pointer (RFC 6901), and the value there.

    None if there is no value.
    """
    keys: list[str | int] = []
    for step in steps:
        key: str | int = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, list) and step.isdecimal() and int(step) < len(here):
            key = int(step)
        elif not isinstance(here, dict) or key not in here:
            return None
        keys.append(key)
        here = here[key]
    return tuple(keys), here


def resolve(root: Any, ref: object, path: str) -> Any:
    """Return the target of a reference. Raises `UnusableError` if it is not in the document."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise UnusableError(
            f"{path}: $ref must be '#' or start with '#/', because only references into the schema "
            f"itself are followed, got {ref!r}"
        )
    found = followed(root, map(unquote, ref.split("/")[1:]))
    if found is None:
        raise UnusableError(f"{path}: $ref {ref!r} leads nowhere")
    here = found[1]
    if not isinstance(here, dict | bool):
        raise UnusableError(f"{path}: $ref {ref!r} leads to something that is no schema")
    return here
