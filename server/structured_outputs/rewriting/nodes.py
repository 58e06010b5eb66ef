"""The shapes of each node of a document, found once."""

from __future__ import annotations

from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.alternatives import alternatives
from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.containers.arrays import MAX_CHOSEN, array_shapes
from server.structured_outputs.rewriting.containers.objects import object_shapes
from server.structured_outputs.rewriting.document import (
    HAS,
    LATER,
    NEGATIVE,
    NOT_FORMATS,
    NOT_MULTIPLES,
    NOT_ONE_OF,
    NOT_PATTERNS,
    NOT_TYPES,
    Node,
    SchemaDocument,
)
from server.structured_outputs.rewriting.negation import OF_TYPE, TYPES
from server.structured_outputs.rewriting.scalars.numbers import number_ranges
from server.structured_outputs.rewriting.scalars.texts import text_language
from server.structured_outputs.rewriting.shapes import (
    AnyValue,
    Array,
    CountedArray,
    FixedValue,
    Number,
    Object,
    Shape,
    Text,
)
from server.structured_outputs.rewriting.values import same, satisfies

_SAYING = frozenset(
    (
        *("type", "enum", "const"),
        *(NOT_ONE_OF, NOT_TYPES, NOT_PATTERNS, NOT_FORMATS, NOT_MULTIPLES, HAS, LATER),
    )
).union(*OF_TYPE.values())
_TYPED_ONLY = frozenset(("type", "title", "description", "default", NEGATIVE))
"""Keywords that exclude no value of the types."""
_DEPTH = 4


class Nodes:
    """Finds the shapes of one document's nodes."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._wide: Nodes | None = self if document.wide else None
        self._shapes: dict[Node, tuple[Shape, ...]] = {}

    def shapes(self, node: Node) -> tuple[Shape, ...]:
        """Return the shapes whose union the node is. Raises `UnusableError`."""
        if node not in self._shapes:
            found: list[Shape] = []
            for plain in alternatives(self._document, node, self._is_surely_empty):
                found += [item for item in self._of_plain(plain) if item not in found]
            self._shapes[node] = tuple(found)
        return self._shapes[node]

    def _is_surely_empty(self, node: Node) -> bool:
        """Return True if no value satisfies the node, proven by a wide document."""
        if self._wide is None:
            self._wide = Nodes(self._document.widened())
        return self._wide.is_empty(node)

    def is_empty(self, node: Node, depth: int = _DEPTH) -> bool:
        """Return True if no value satisfies the node; descends `depth` levels.

        A proof if the document is wide; otherwise it holds for the grammar only.
        """
        try:
            return all(self._is_empty(shape, depth) for shape in self.shapes(node))
        except UnusableError:
            # It has too many combinations to decide.
            return False

    def _is_empty(self, shape: Shape, depth: int) -> bool:
        if depth == 0:
            return False
        if isinstance(shape, Object):
            needed = [item.node for item in shape.properties if item.required]
            needed += shape.last or ()
        elif isinstance(shape, Array):
            needed = list(shape.first[: shape.least])
            if shape.rest is not None and shape.least > len(shape.first):
                needed.append(shape.rest)
        elif isinstance(shape, CountedArray):
            return self._lacks_items(shape, depth)
        else:
            return False
        return any(self.is_empty(node, depth - 1) for node in needed)

    def _lacks_items(self, shape: CountedArray, depth: int) -> bool:
        """Return True if no item can count for a `contains` that needs some."""
        every = [option for options in (*shape.first, shape.rest) for option in options]
        needed = [
            [option.node for option in every if index in option.counts]
            for index, (least, _) in enumerate(shape.contained)
            if least
        ]
        return any(all(self.is_empty(node, depth - 1) for node in nodes) for nodes in needed)

    def _of_plain(self, plain: Plain) -> list[Shape]:
        plain = [item for item in plain if _SAYING & item.keys()]
        if not plain:
            return [AnyValue()]
        listed = next((item for item in plain if {"enum", "const"} & item.keys()), None)
        if listed is not None:
            values = listed.get("enum", [listed["const"]] if "const" in listed else [])
            return [
                FixedValue(value) for value in values if satisfies(self._document, value, plain)
            ]
        types = _types(plain, open_=self._document.open)
        constrained = any(not _TYPED_ONLY.issuperset(item) for item in plain)
        found: list[Shape] = [
            FixedValue(value)
            for kind, values in (("null", (None,)), ("boolean", (True, False)))
            if kind in types
            for value in values
            if not constrained or satisfies(self._document, value, plain)
        ]
        found += self._scalars(plain, types)
        return found + self._containers(plain, types)

    def _scalars(self, plain: Plain, types: set[str]) -> list[Shape]:
        found: list[Shape] = []
        if "string" in types and (language := text_language(self._document, plain)) is not None:
            found.append(Text(language))
        if "integer" in types:
            whole = "number" not in types
            found += [Number(item) for item in number_ranges(self._document, plain, whole=whole)]
        return found

    def _containers(self, plain: Plain, types: set[str]) -> list[Shape]:
        found: list[Shape] = []
        if "array" in types:
            found += array_shapes(self._document, plain, self._values_of)
        if "object" in types:
            found += object_shapes(self._document, plain)
        return found

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


def _types(plain: Plain, *, open_: bool) -> set[str]:
    """Return the types that a value may have; 'number' implies 'integer'."""
    types = set(TYPES)
    for schema in plain:
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            types &= {*named, "integer"} if "number" in named else set(named)
        for name in schema.get(NOT_TYPES, ()):
            types -= {name, "integer"} if name == "number" else {name}
    if open_ or any("type" in schema for schema in plain):
        return types
    # Without a type, the keywords imply it.
    meant = {
        kind for kind, keys in OF_TYPE.items() for schema in plain if schema.keys() & set(keys)
    }
    return types & (meant | ({"integer"} if "number" in meant else set())) if meant else types
