"""The shapes of each node of a document, found once."""

from __future__ import annotations

import json
from typing import Any

from server.structured_outputs.rewriting.alternatives import Plain, alternatives
from server.structured_outputs.rewriting.arrays import MAX_CHOSEN, array_shape
from server.structured_outputs.rewriting.document import NOT_ONE_OF, Document, Node
from server.structured_outputs.rewriting.negation import TYPES
from server.structured_outputs.rewriting.numbers import exact, number_ranges
from server.structured_outputs.rewriting.objects import object_shape
from server.structured_outputs.rewriting.shapes import (
    AnyValue,
    Array,
    FixedValue,
    Number,
    Object,
    Shape,
    Text,
)
from server.structured_outputs.rewriting.texts import text_schema

_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames"),
        *("required", "minProperties", "maxProperties"),
    ),
}
_SAYING = frozenset(("type", "enum", "const", NOT_ONE_OF)).union(*_OF_TYPE.values())
_DEPTH = 4


class Nodes:
    """Reads the nodes of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._shapes: dict[Node, tuple[Shape, ...]] = {}

    def shapes(self, node: Node) -> tuple[Shape, ...]:
        """Return what a value of the node looks like: one of these. Raises `UnusableError`."""
        if node not in self._shapes:
            found: list[Shape] = []
            for plain in alternatives(self._document, node, self._exclude_each_other):
                found += [item for item in self._of_plain(plain) if item not in found]
            self._shapes[node] = tuple(found)
        return self._shapes[node]

    def is_empty(self, node: Node, depth: int = _DEPTH) -> bool:
        """Whether surely no value satisfies the node; looks a few levels deep."""
        return all(self._is_empty(shape, depth) for shape in self.shapes(node))

    def _is_empty(self, shape: Shape, depth: int) -> bool:
        if depth == 0:
            return False
        if isinstance(shape, Object):
            needed = [item.node for item in shape.properties if item.required]
        elif isinstance(shape, Array):
            needed = list(shape.first[: shape.least])
            if shape.rest is not None and shape.least > len(shape.first):
                needed.append(shape.rest)
        else:
            return False
        return any(self.is_empty(node, depth - 1) for node in needed)

    def _exclude_each_other(self, one: Any, other: Any) -> bool:
        return self.is_empty(Node.of(one, other))

    def _of_plain(self, plain: Plain) -> list[Shape]:
        plain = [item for item in plain if _SAYING & item.keys()]
        if not plain:
            return [AnyValue()]
        listed = next((item for item in plain if {"enum", "const"} & item.keys()), None)
        if listed is not None:
            values = listed.get("enum", [listed["const"]] if "const" in listed else [])
            return [FixedValue(value) for value in values if self._is_valid(value, plain)]
        types = _types(plain)
        found: list[Shape] = [
            FixedValue(value)
            for kind, values in (("null", (None,)), ("boolean", (True, False)))
            if kind in types
            for value in values
            if self._is_valid(value, plain)
        ]
        found += self._scalars(plain, types)
        return found + self._containers(plain, types)

    def _scalars(self, plain: Plain, types: set[str]) -> list[Shape]:
        found: list[Shape] = []
        if "string" in types and (schema := text_schema(self._document, plain)) is not None:
            found.append(Text(schema))
        if "integer" in types:
            whole = "number" not in types
            found += [Number(item) for item in number_ranges(self._document, plain, whole=whole)]
        return found

    def _containers(self, plain: Plain, types: set[str]) -> list[Shape]:
        found: list[Shape] = []
        if "array" in types:
            array = array_shape(self._document, plain, self._values_of)
            found += [array] if array is not None else []
        if "object" in types:
            object_ = object_shape(self._document, plain)
            found += [object_] if object_ is not None else []
        for item in plain:
            kinds = {"array" if isinstance(v, list) else "object" for v in item.get(NOT_ONE_OF, ())
                     if isinstance(v, list | dict)}  # fmt: skip
            if kinds & types:
                self._document.leave_out(
                    item, "'not' of an array or object in 'const' or 'enum' has no rewriting"
                )
        return found

    def _is_valid(self, value: Any, plain: Plain) -> bool:
        return all(
            self._document.is_valid(value, item)
            and not any(same(value, other) for other in item.get(NOT_ONE_OF, ()))
            for item in plain
        )

    def _values_of(self, node: Node) -> list[Any] | None:
        found: list[Any] = []
        for shape in self.shapes(node):
            if isinstance(shape, FixedValue):
                found.append(shape.value)
            elif isinstance(shape, Number) and shape.range.whole:
                first, last, unit = shape.range.first(), shape.range.last(), shape.range.unit
                if (last - first) / unit >= MAX_CHOSEN:
                    return None
                found += range(int(first), int(last) + 1, int(unit))
            else:
                return None
            if len(found) > MAX_CHOSEN:
                return None
        apart: list[Any] = []
        for value in found:
            if not any(same(value, other) for other in apart):
                apart.append(value)
        return apart


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: numbers by value, and no number is a boolean."""
    return _canonical(one) == _canonical(other)


def _canonical(value: Any) -> str:
    if isinstance(value, dict):
        items = (f"{json.dumps(key)}:{_canonical(value[key])}" for key in sorted(value))
        return f"{{{','.join(items)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(exact(value))
    return json.dumps(value)


def _types(plain: Plain) -> set[str]:
    """Return the types that a value may have; 'integer' stands beside 'number'."""
    types = set(TYPES)
    for schema in plain:
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            types &= {*named, "integer"} if "number" in named else set(named)
    if any("type" in schema for schema in plain):
        return types
    # No type is named: the keywords tell which is meant.
    meant = {
        kind for kind, keys in _OF_TYPE.items() for schema in plain if schema.keys() & set(keys)
    }
    return meant | ({"integer"} if "number" in meant else set()) or types
