"""Shapes of arrays.

An array whose schema lists its first items has no others unless `items` allows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import (
    LATER,
    InexactError,
    Node,
    SchemaDocument,
)
from server.structured_outputs.rewriting.shapes import (
    Array,
    CountedArray,
    CountedItem,
    FixedValue,
    Shape,
)
from server.structured_outputs.rewriting.values import same
from server.structured_outputs.schema_walk import Schema

MAX_CHOSEN = 48
"""Most values of items that must differ: llguidance counts in 64 bits."""

MAX_LISTED = 256
"""Most arrays of differing items that are listed one by one."""
MAX_CONTAINED = 4
"""Most `contains` of one array: each doubles the options of an item."""

FiniteValues = Callable[[Node], list[Any] | None]
"""Returns the values of a node, or None if they cannot be listed."""


def array_shapes(
    document: SchemaDocument, plain: Plain, values_of: FiniteValues
) -> Sequence[Shape]:
    """Return the arrays that satisfy all of the schemas, as a union."""
    first, rest = _items(plain, open_=document.open)
    least = max((int(item.get("minItems", 0)) for item in plain), default=0)
    most = min((int(item["maxItems"]) for item in plain if "maxItems" in item), default=None)
    if rest is None:
        most = len(first) if most is None else min(most, len(first))
    if most is not None and least > most:
        return []
    shape = Array(first, rest, least, most)
    if most is not None and most == 0:
        wanted = any(item.get("minContains", 1) for item in plain if "contains" in item)
        return [] if wanted or any(item.get(LATER) for item in plain) else [shape]
    try:
        return _counted(plain, shape, values_of)
    except InexactError as error:
        document.leave_out(plain[0], error)
        return [shape]


def _items(plain: Plain, *, open_: bool) -> tuple[tuple[Node, ...], Node | None]:
    """Return the nodes of the first items and of the rest."""
    count = max((len(item.get("prefixItems", ())) for item in plain), default=0)
    least = max((item.get("minItems", 0) for item in plain), default=0)
    first: list[Node] = []
    for index in range(count):
        node = Node.of(*(_item(schema, index) for schema in plain))
        if False in node.schemas:
            return tuple(first), None
        first.append(node)
    rest = Node.of(*(schema.get("items", True) for schema in plain))
    listed_only = count and least <= count and all("items" not in schema for schema in plain)
    closed = (listed_only and not open_) or False in rest.schemas
    return tuple(first), None if closed else rest


def _item(schema: Schema, index: int) -> Any:
    listed = schema.get("prefixItems", ())
    return listed[index] if index < len(listed) else schema.get("items", True)


def _counted(plain: Plain, shape: Array, values_of: FiniteValues) -> Sequence[Shape]:
    """Return the shapes with `uniqueItems` and `contains`. Raises `InexactError`."""
    differ = any(item.get("uniqueItems") is True for item in plain) and shape.most != 1
    contains = [_Contained.of(item) for item in plain if "contains" in item]
    contains += [_Contained(inner, 1, None, start)
                 for item in plain for start, inner in item.get(LATER, ())]  # fmt: skip
    contains = [item for item in contains if item.least or item.most is not None]
    if differ and contains:
        raise InexactError("'uniqueItems' and 'contains' cannot be combined")
    if differ:
        return _distinct(shape, values_of)
    return [_containing(shape, contains) if contains else shape]


def _distinct(shape: Array, values_of: FiniteValues) -> list[Shape]:
    """Return the arrays whose items differ."""
    if shape.first or shape.rest is None:
        return _listed(shape, values_of)
    values = values_of(shape.rest)
    if values is None:
        raise InexactError(
            "'uniqueItems' is supported for items of an 'enum' or other list of at most "
            f"{MAX_CHOSEN} values; give 'items' an 'enum', set 'maxItems' to 1, or leave "
            "'uniqueItems' out"
        )
    return [Array((), shape.rest, shape.least, shape.most, tuple(values))]


def _listed(shape: Array, values_of: FiniteValues) -> list[Shape]:
    """Return each array of differing items by itself; those of a place have values of their own."""
    found: list[Shape] = []
    longer: list[list[Any]] = [[]]
    while longer:
        array = longer.pop(0)
        index = len(array)
        if index >= shape.least:
            found.append(FixedValue(array))
        node = shape.first[index] if index < len(shape.first) else shape.rest
        if node is None or index == shape.most:
            continue
        values = values_of(node)
        if values is None or len(found) + len(longer) > MAX_LISTED:
            raise InexactError(
                "'uniqueItems' beside 'prefixItems' is supported for items of few listed values, "
                f"which have at most {MAX_LISTED} arrays together; list the arrays in an 'enum'"
            )
        longer += [
            [*array, value] for value in values if not any(same(value, item) for item in array)
        ]
    return found


@dataclass(frozen=True, slots=True)
class _Contained:
    """`least` to `most` items from the index `start` on satisfy `inner`."""

    inner: Any
    least: int
    most: int | None
    start: int = 0

    @classmethod
    def of(cls, schema: Schema) -> _Contained:
        most = schema.get("maxContains")
        least = int(schema.get("minContains", 1))
        return cls(schema["contains"], least, None if most is None else int(most))


def _containing(shape: Array, contains: list[_Contained]) -> CountedArray:
    if len(contains) > MAX_CONTAINED:
        raise InexactError(
            f"an array has at most {MAX_CONTAINED} 'contains', got {len(contains)}; combine them"
        )
    count = max(len(shape.first), *(item.start for item in contains))
    places = [_item_options(shape, contains, index) for index in range(count + 1)]
    return CountedArray(
        *(tuple(places[:count]), places[count], shape.least, shape.most),
        tuple((item.least, item.most) for item in contains),
    )


def _item_options(shape: Array, contains: list[_Contained], index: int) -> tuple[CountedItem, ...]:
    """Return the options of the item at an index: which of the `contains` count it."""
    base = shape.first[index] if index < len(shape.first) else shape.rest
    if base is None:
        return ()
    here = [place for place, item in enumerate(contains) if index >= item.start]
    found = []
    for size in range(len(here) + 1):
        for counts in combinations(here, size):
            held = [contains[place].inner for place in counts]
            # Without a most number, an item that is not counted may satisfy the schema, too.
            fails = [
                {"not": contains[place].inner}
                for place in here
                if place not in counts and contains[place].most is not None
            ]
            node = Node.of(*base.schemas, *held, *fails)
            if False not in node.schemas:
                found.append(CountedItem(node, counts))
    return tuple(found)
