"""Shapes of values: each is of one JSON type, with nodes for its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.structured_outputs.rewriting.document import Node
from server.structured_outputs.rewriting.scalars.languages import Language
from server.structured_outputs.rewriting.scalars.numbers import NumberRange


@dataclass(frozen=True, slots=True)
class AnyValue:
    """All JSON values."""


@dataclass(frozen=True, slots=True)
class FixedValue:
    """One value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Text:
    """The strings of a language."""

    language: Language


@dataclass(frozen=True, slots=True)
class Number:
    """The numbers of a range."""

    range: NumberRange


@dataclass(frozen=True, slots=True)
class Array:
    """Arrays of the `first` items and any number of `rest`; None allows no further items.

    `chosen` are the values of items that must differ from each other.
    """

    first: tuple[Node, ...]
    rest: Node | None
    least: int
    most: int | None
    chosen: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class CountedItem:
    """An option for one item: its node, and the indices of the `contains` that count it."""

    node: Node
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CountedArray:
    """Arrays in which `contains` counts items: `least` to `most` of each in `contained`.

    `first` has the options of the first items, `rest` those of further ones; an array ends where
    an item has no option.
    """

    first: tuple[tuple[CountedItem, ...], ...]
    rest: tuple[CountedItem, ...]
    least: int
    most: int | None
    contained: tuple[tuple[int, int | None], ...]

    def options(self, index: int) -> tuple[CountedItem, ...]:
        """Return the options of the item at an index."""
        return self.first[index] if index < len(self.first) else self.rest


@dataclass(frozen=True, slots=True)
class Property:
    """An optional or required property of an object."""

    name: str
    node: Node
    required: bool


@dataclass(frozen=True, slots=True)
class Object:
    """Objects: the listed properties, and any number of others by name and value.

    The listed ones come in their order, unless they may come in `any_order`. With `last`, an
    unlisted property of that name and value comes at the end.
    """

    properties: tuple[Property, ...]
    others: tuple[tuple[Node, Node], ...]
    least: int
    most: int | None
    any_order: bool = False
    last: tuple[Node, Node] | None = None


Shape = AnyValue | FixedValue | Text | Number | Array | CountedArray | Object
