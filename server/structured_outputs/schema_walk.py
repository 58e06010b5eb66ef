"""Traversal of JSON schemas: keywords that hold schemas, and references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from server.structured_outputs.constraint import UnusableError

Schema = dict[str, Any]

Steps = tuple[str | int, ...]
"""Keys from a schema to a part of it."""

_HERE, _BELOW, _ASIDE = 0, 1, 2
# Keywords by the value to which their schemas apply: the same one, a part of it, or none.
_ONE = {
    **dict.fromkeys(("not", "if", "then", "else"), _HERE),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "propertyNames"), _BELOW),
    **dict.fromkeys(("items", "additionalItems", "unevaluatedItems", "contains"), _BELOW),
}
_MANY = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _HERE),
    **dict.fromkeys(("prefixItems", "items"), _BELOW),
}
_NAMED = {
    **dict.fromkeys(("dependentSchemas", "dependencies"), _HERE),
    **dict.fromkeys(("properties", "patternProperties"), _BELOW),
    **dict.fromkeys(("$defs", "definitions"), _ASIDE),
}


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


def applied_here(schema: Schema, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that apply to the same value as `schema`, without references."""
    for where, steps, item in _parts(schema):
        if where == _HERE:
            yield _joined(path, steps), item


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
    for _, steps, item in _parts(schema):
        if isinstance(item, dict):
            yield steps, item


def _parts(schema: Schema) -> Iterator[tuple[int, Steps, Any]]:
    """Yield the schemas directly in a schema: the value that each is of, its keys, and itself."""
    for key, value in schema.items():
        if isinstance(value, dict):
            if (where := _NAMED.get(key)) is not None:
                for name, item in value.items():
                    yield where, (key, name), item
            elif (where := _ONE.get(key)) is not None:
                yield where, (key,), value
        elif isinstance(value, list):
            if (where := _MANY.get(key)) is not None:
                for index, item in enumerate(value):
                    yield where, (key, index), item
        elif isinstance(value, bool) and (where := _ONE.get(key)) is not None:
            yield where, (key,), value


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


def rebuilt(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return the schema with `change` applied to every schema in it, innermost first."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key, value in schema.items():
        if isinstance(value, dict):
            if key in _NAMED:
                copy[key] = {name: rebuilt(item, change) for name, item in value.items()}
            elif key in _ONE:
                copy[key] = rebuilt(value, change)
        elif isinstance(value, list) and key in _MANY:
            copy[key] = [rebuilt(item, change) for item in value]
    return change(copy)
