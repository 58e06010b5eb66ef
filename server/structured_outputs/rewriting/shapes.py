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
    contained: Contained | None = None


@dataclass(frozen=True, slots=True)
class Contained:
    """`contains`: an array has `least` to `most` items of `node`; the others are of `other`."""

    node: Node
    other: Node
    least: int
    most: int | None


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


Shape = AnyValue | FixedValue | Text | Number | Array | Object
