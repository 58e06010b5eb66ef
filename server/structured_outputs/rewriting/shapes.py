"""What a value can look like: one shape of one JSON type, over nodes for its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.structured_outputs.rewriting.document import Node
from server.structured_outputs.rewriting.scalars.numbers import NumberRange
from server.structured_outputs.schema_walk import Schema


@dataclass(frozen=True, slots=True)
class AnyValue:
    """Every JSON value."""


@dataclass(frozen=True, slots=True)
class FixedValue:
    """One value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Text:
    """Strings, as the backend's schema of them."""

    schema: Schema


@dataclass(frozen=True, slots=True)
class Number:
    """Numbers of a range."""

    range: NumberRange


@dataclass(frozen=True, slots=True)
class Array:
    """An array: its first items one by one, then `rest`; None for no more than those.

    `chosen` are the values of items that differ from each other. `contained` with the number of
    items that are of it (`least` to `most`), and `other` for items that are not.
    """

    first: tuple[Node, ...]
    rest: Node | None
    least: int
    most: int | None
    chosen: tuple[Any, ...] | None = None
    contained: Contained | None = None


@dataclass(frozen=True, slots=True)
class Contained:
    """Items of which an array has `least` to `most`; `other` are those that are none of them."""

    node: Node
    other: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Property:
    """A property that an object may have, or must."""

    name: str
    node: Node
    required: bool


@dataclass(frozen=True, slots=True)
class Object:
    """An object: its listed properties in order, then any number of others by name and value."""

    properties: tuple[Property, ...]
    others: tuple[tuple[Node, Node], ...]
    least: int
    most: int | None


Shape = AnyValue | FixedValue | Text | Number | Array | Object
