"""Traversal of JSON schemas: keywords that hold schemas, and references."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from server.structured_outputs.constraint import UnusableError

Schema = dict[str, Any]

_ONE_HERE = ("not", "if", "then", "else")
_MANY_HERE = ("allOf", "anyOf", "oneOf")
_ONE_BELOW = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("items", "additionalItems", "unevaluatedItems", "contains"),
)
_MANY_BELOW = ("prefixItems", "items")
_NAMED_BELOW = ("properties", "patternProperties")
_NAMED_ASIDE = ("$defs", "definitions")


def applied_here(schema: Schema, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that apply to the same value as `schema`, without references."""
    yield from _single(schema, path, _ONE_HERE)
    yield from _listed(schema, path, _MANY_HERE)
    yield from _named(schema, path, ("dependentSchemas", "dependencies"))


def applied_below(schema: Schema, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that apply to a part of the value."""
    yield from _single(schema, path, _ONE_BELOW)
    yield from _listed(schema, path, _MANY_BELOW)
    yield from _named(schema, path, _NAMED_BELOW)


def every_schema(root: Any) -> Iterator[tuple[str, Schema]]:
    """Yield the path and the schema of each schema object in the document, once."""
    stack: list[tuple[str, Any]] = [("$", root)]
    while stack:
        path, schema = stack.pop()
        if isinstance(schema, dict):
            yield path, schema
            stack += applied_here(schema, path)
            stack += applied_below(schema, path)
            stack += _named(schema, path, _NAMED_ASIDE)


def children(schema: Schema) -> Iterator[tuple[tuple[str | int, ...], Schema]]:
    """Yield the schemas directly in a schema that are objects, each with its keys."""
    found: list[tuple[tuple[str | int, ...], Any]] = []
    found += [((key,), schema.get(key)) for key in (*_ONE_HERE, *_ONE_BELOW)]
    for key in (*_MANY_HERE, *_MANY_BELOW):
        if isinstance(listed := schema.get(key), list):
            found += [((key, index), item) for index, item in enumerate(listed)]
    for key in (*_NAMED_BELOW, *_NAMED_ASIDE, "dependentSchemas", "dependencies"):
        if isinstance(named := schema.get(key), dict):
            found += [((key, name), item) for name, item in named.items()]
    return ((keys, item) for keys, item in found if isinstance(item, dict))


def followed(here: Any, steps: Iterable[str]) -> tuple[tuple[str | int, ...], Any] | None:
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


def _single(schema: Schema, path: str, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        if isinstance(schema.get(key), dict | bool):
            yield f"{path}.{key}", schema[key]


def _listed(schema: Schema, path: str, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        if isinstance(schema.get(key), list):
            for index, item in enumerate(schema[key]):
                yield f"{path}.{key}[{index}]", item


def _named(schema: Schema, path: str, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        if isinstance(schema.get(key), dict):
            for name, item in schema[key].items():
                yield f"{path}.{key}.{name}", item


def rebuilt(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """Return the schema with `change` applied to every schema in it, innermost first."""
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key in (*_ONE_HERE, *_ONE_BELOW):
        if isinstance(copy.get(key), dict):
            copy[key] = rebuilt(copy[key], change)
    for key in (*_MANY_HERE, *_MANY_BELOW):
        if isinstance(copy.get(key), list):
            copy[key] = [rebuilt(item, change) for item in copy[key]]
    for key in (*_NAMED_BELOW, *_NAMED_ASIDE, "dependentSchemas", "dependencies"):
        if isinstance(copy.get(key), dict):
            copy[key] = {name: rebuilt(item, change) for name, item in copy[key].items()}
    return change(copy)
