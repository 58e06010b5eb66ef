"""Shapes of arrays.

An array whose schema lists its first items has no others unless `items` allows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import InexactError, Node, SchemaDocument
from server.structured_outputs.rewriting.shapes import Array, Contained
from server.structured_outputs.schema_walk import Schema

MAX_CHOSEN = 48
"""Most values of items that must differ: llguidance counts in 64 bits."""

FiniteValues = Callable[[Node], list[Any] | None]
"""Returns the values of a node, or None if they cannot be listed."""


def array_shape(document: SchemaDocument, plain: Plain, values_of: FiniteValues) -> Array | None:
    """Return the arrays that satisfy all of the schemas, or None if there are none."""
    first, rest = _items(plain, open_=document.open)
    least = max((int(item.get("minItems", 0)) for item in plain), default=0)
    most = min((int(item["maxItems"]) for item in plain if "maxItems" in item), default=None)
    if rest is None:
        most = len(first) if most is None else min(most, len(first))
    if most is not None and least > most:
        return None
    shape = Array(first, rest, least, most)
    if most is not None and most == 0:
        wanted = any(item.get("minContains", 1) for item in plain if "contains" in item)
        return None if wanted else shape
    try:
        return _counted(plain, shape, values_of)
    except InexactError as error:
        document.leave_out(plain[0], error)
        return shape


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


def _counted(plain: Plain, shape: Array, values_of: FiniteValues) -> Array:
    """Return the shape with `uniqueItems` and `contains`. Raises `InexactError`."""
    differ = any(item.get("uniqueItems") is True for item in plain) and shape.most != 1
    contains = [item for item in plain if "contains" in item and item.get("minContains") != 0]
    contains += [item for item in plain if item.get("minContains") == 0 and "maxContains" in item]
    if not differ and not contains:
        return shape
    if shape.first or shape.rest is None:
        what = "uniqueItems" if differ else "contains"
        raise InexactError(f"{what!r} beside 'prefixItems' is not supported; put it into the items")
    if differ and contains:
        raise InexactError("'uniqueItems' and 'contains' cannot be combined")
    if differ:
        values = values_of(shape.rest)
        if values is None:
            raise InexactError(
                "'uniqueItems' is supported for items of an 'enum' or other list of at most "
                f"{MAX_CHOSEN} values; give 'items' an 'enum', set 'maxItems' to 1, or leave "
                "'uniqueItems' out"
            )
        return Array((), shape.rest, shape.least, shape.most, tuple(values))
    return _containing(shape, shape.rest, contains)


def _containing(shape: Array, rest: Node, contains: list[Schema]) -> Array:
    if len(contains) > 1:
        raise InexactError("'contains' is supported once for an array, not in each part of 'allOf'")
    inner, least = contains[0]["contains"], int(contains[0].get("minContains", 1))
    most = contains[0].get("maxContains")
    node = Node.of(*rest.schemas, inner)
    # Without `maxContains`, other items may satisfy `contains` too.
    other = rest if most is None else Node.of(*rest.schemas, {"not": inner})
    contained = Contained(node, other, least, None if most is None else int(most))
    return Array((), rest, shape.least, shape.most, None, contained)
