"""Checks of references: unresolvable, circular, or satisfied by infinite values only.

A recursive schema is accepted if a finite value satisfies it and every recursion descends into
the value.
"""

from __future__ import annotations

from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.schema_walk import (
    Schema,
    applied_here,
    every_schema,
    names_within,
    resolve,
)

_SCALARS = frozenset(("string", "number", "integer", "boolean", "null"))


def check_refs(root: Any) -> None:
    """Raise `UnusableError` for the first reference that no finite answer can follow."""
    if "$ref" not in names_within(root):
        return
    schemas = {id(schema): (path, schema) for path, schema in every_schema(root)}
    if not any("$ref" in schema for _, schema in schemas.values()):
        return
    # A target may be outside of all keywords that hold schemas.
    queue = list(schemas.values())
    while queue:
        path, schema = queue.pop()
        if "$ref" not in schema:
            continue
        target = resolve(root, schema["$ref"], path)
        for inner_path, inner in every_schema(target):
            if id(inner) not in schemas:
                schemas[id(inner)] = (f"{schema['$ref']}{inner_path[1:]}", inner)
                queue.append(schemas[id(inner)])
    _check_circles(root, schemas)
    _check_finite(root, schemas)


def _check_circles(root: Any, schemas: dict[int, tuple[str, Schema]]) -> None:
    """Refuse a schema that refers to itself for the same value."""
    done: set[int] = set()
    for start in schemas:
        # Without recursion: a chain of references can be deeper than Python's stack.
        open_: set[int] = set()
        stack = [(start, False)]
        while stack:
            node, leaving = stack.pop()
            if leaving:
                open_.discard(node)
                done.add(node)
                continue
            if node in open_ or node in done:
                continue
            open_.add(node)
            stack.append((node, True))
            for child in _same_value(root, *schemas[node]):
                if id(child) in open_:
                    path = schemas[node][0]
                    raise UnusableError(f"{path}: it refers to itself for the same value")
                stack.append((id(child), False))


def _same_value(root: Any, path: str, schema: Schema) -> list[Schema]:
    found = [item for _, item in applied_here(schema, path)]
    if "$ref" in schema:
        found.append(resolve(root, schema["$ref"], path))
    return [item for item in found if isinstance(item, dict)]


def _check_finite(root: Any, schemas: dict[int, tuple[str, Schema]]) -> None:
    """Refuse a schema that only infinite values satisfy, such as one that requires itself."""
    finite: set[int] = set()
    changed = True
    while changed:
        changed = False
        for node, (path, schema) in reversed(schemas.items()):
            if node not in finite and _is_finite(root, path, schema, finite):
                finite.add(node)
                changed = True
    if isinstance(root, dict) and id(root) not in finite:
        raise UnusableError("$: no finite value satisfies it, because it requires itself")


def _is_finite(root: Any, path: str, schema: Schema, finite: set[int]) -> bool:
    def known(item: Any) -> bool:
        return item is True or id(item) in finite

    if "$ref" in schema and not known(resolve(root, schema["$ref"], path)):
        return False
    if not all(known(item) for item in _items(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        if (branches := _items(schema, key)) and not any(known(item) for item in branches):
            return False
    types = schema.get("type")
    types = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set()
    if types & _SCALARS:
        return True
    return all(known(item) for item in _needed_parts(schema))


def _items(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _needed_parts(schema: Schema) -> list[Any]:
    """Return the schemas of the parts that every value has."""
    properties, required = schema.get("properties"), _items(schema, "required")
    needed = []
    if isinstance(properties, dict):
        needed = [properties[name] for name in required if name in properties]
    count = schema.get("minItems")
    if isinstance(count, int) and count > 0:
        first = _items(schema, "prefixItems")
        needed += first[:count]
        if count > len(first) and isinstance(schema.get("items"), dict | bool):
            needed.append(schema["items"])
    return needed
