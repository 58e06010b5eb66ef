"""Exclusion among JSON schemas: which values two schemas share, and what a schema excludes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.patterns import without
from server.structured_outputs.schema_document import Node, SchemaDocument, Steps

Types = frozenset[str]
"""Types of JSON values; `fraction` is that of numbers that are no integers."""

ALL_TYPES: Types = frozenset(
    ("null", "boolean", "integer", "fraction", "string", "array", "object")
)
_NUMBERS = frozenset(("integer", "fraction"))
_LITTLE, _EXACT = 1e-9, 1e6
"""Least distance of a bound, and the size up to which doubles hold it."""
_MOST_NUMBERS = 64
_MOST_CHARACTERS = 4000
_OTHER_SIDE = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""By bound: the type that it is of, and the bound of what it excludes with its step."""
ASSERTIONS = frozenset(
    "type enum const $ref allOf anyOf oneOf not if pattern format multipleOf items "
    "prefixItems uniqueItems contains unevaluatedItems unevaluatedProperties properties "
    "patternProperties additionalProperties propertyNames required minProperties "
    "maxProperties dependentRequired dependentSchemas".split()
).union(_OTHER_SIDE)
"""Keywords that may refuse a value by themselves."""


class NoNegationError(ValueError):
    """What a schema excludes is no schema that can be followed; the message names the keyword."""


def get_types(schema: Any) -> Types:
    found = ALL_TYPES
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found = frozenset(
            one for name in given for one in (_NUMBERS if name == "number" else (name,))
        )
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            found &= frozenset(map(_type_of, values))
    return found


def named(types: Types) -> list[str] | None:
    """Return the types as `type` names them; None if it has no name for them."""
    if "fraction" not in types:
        return sorted(types)
    return None if "integer" not in types else sorted(types - _NUMBERS | {"number"})


def get_key(value: Any) -> Any:
    """Return what is equal for equal JSON values."""
    if isinstance(value, dict):
        return "object", frozenset((name, get_key(item)) for name, item in value.items())
    if isinstance(value, list):
        return "array", tuple(map(get_key, value))
    return "number" if _type_of(value) in _NUMBERS else _type_of(value), value


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


class Exclusion:
    """Exclusion within one document; `most_steps` bounds the work of all calls together.

    `positive` returns a subschema in the form that llguidance takes.
    """

    def __init__(
        self, document: SchemaDocument, most_steps: int, positive: Callable[[Node], Any]
    ) -> None:
        self._document = document
        self._positive = positive
        self._steps = most_steps
        self._compared: dict[Any, bool] = {}
        self._negated: set[Steps] = set()

    def step(self) -> None:
        """Count a step. Raises `UnusableError` after the last."""
        self._steps -= 1
        if self._steps < 0:
            raise UnusableError("#: it has too many combinations, more than this server follows")

    def exclusive(self, one: Sequence[Node], other: Sequence[Node]) -> bool:
        """Return True if no value satisfies all of both sides, as far as is easily seen."""
        self.step()
        key = tuple(node.steps for node in one), tuple(node.steps for node in other)
        if key not in self._compared:
            # Where a schema contains itself, nothing is known.
            self._compared[key] = False
            self._compared[key] = self._compare(one, other)
        return self._compared[key]

    def _compare(self, one: Sequence[Node], other: Sequence[Node]) -> bool:
        first, second = self._together(one), self._together(other)
        if first is None or second is None:
            return True
        common = ALL_TYPES
        for schema in (*map(_schema, first), *map(_schema, second)):
            common &= get_types(schema)
        if not common:
            return True
        mine, theirs = _values(first), _values(second)
        if mine is not None and theirs is not None and mine.isdisjoint(theirs):
            return True
        if common == {"object"} and self._by_names(first, second):
            return True
        for nodes, others in ((first, second), (second, first)):
            for node in nodes:
                for keyword in ("anyOf", "oneOf"):
                    branches = self._document.children(node, keyword)
                    if branches and all(self.exclusive([b], others) for b in branches):
                        return True
        return False

    def _by_names(self, first: Sequence[Node], second: Sequence[Node]) -> bool:
        """Return True for a required property that one side forbids, or with other values."""
        names = {name for node in (*first, *second) for name in _schema(node).get("required", ())}
        for name in sorted(names):
            mine, theirs = self._of_property(first, name), self._of_property(second, name)
            if mine is None or theirs is None:
                return True
            if mine and theirs and self.exclusive(mine, theirs):
                return True
        return False

    def _of_property(self, nodes: Sequence[Node], name: str) -> list[Node] | None:
        """Return the schemas of a property; None if a schema forbids it."""
        found = list[Node]()
        for node in nodes:
            schema = _schema(node)
            if name in schema.get("properties", {}):
                found.append(self._document.child(node, "properties", name))
            elif schema.get("additionalProperties") is False and not any(
                matches(pattern, name, unclear=True)
                for pattern in schema.get("patternProperties", {})
            ):
                return None
        return None if any(node.schema is False for node in found) else found

    def _together(self, nodes: Sequence[Node]) -> list[Node] | None:
        """Return all schemas that apply with these; None if no value satisfies one of them."""
        found, waiting = list[Node](), list(nodes)
        while waiting:
            node = waiting.pop()
            self.step()
            if node.schema is False:
                return None
            if node.schema is True or node in found:
                continue
            found.append(node)
            waiting += self._document.children(node, "allOf")
            if "$ref" in node.schema:
                waiting.append(self._document.target(node))
        return found

    def negated(self, node: Node, types: Types) -> list[Any]:
        """Return schemas of which a value of `types` satisfies one if it does not satisfy `node`.

        They are in the form that llguidance takes. Raises `NoNegationError`.
        """
        self.step()
        if isinstance(node.schema, bool):
            return [] if node.schema else [True]
        if node.steps in self._negated:
            raise NoNegationError("a schema that contains itself")
        self._negated.add(node.steps)
        found = list[Any]()
        for keyword, value in node.schema.items():
            if keyword in ASSERTIONS:
                found += self._negated_keyword(node, keyword, value, types)
        self._negated.discard(node.steps)
        return [
            one for one in found if one is True or (one is not False and types & get_types(one))
        ]

    def _negated_keyword(self, node: Node, keyword: str, value: Any, types: Types) -> list[Any]:
        if keyword in _OTHER_SIDE:
            kind, bound, step = _OTHER_SIDE[keyword]
            if bound == "exclusiveMinimum":
                return [{"type": kind, **above(value)}]
            return [{"type": kind, bound: value + step}] if value + step >= 0 or step == 0 else []
        if keyword == "format" or (keyword == "additionalProperties" and value is True):
            # An annotation refuses nothing.
            return []
        if (negate := _NEGATED.get(keyword)) is None:
            raise NoNegationError(repr(keyword))
        return negate(self, node, value, types)

    def _other_types(self, _node: Node, value: Any, types: Types) -> list[Any]:
        if (names := named(types - get_types({"type": value}))) is None:
            raise NoNegationError("a 'type' of integers, which leaves other numbers")
        return [{"type": names}] if names else []

    def _not_any(self, node: Node, _value: Any, types: Types) -> list[Any]:
        parts = [self.negated(part, types) for part in self._document.children(node, "anyOf")]
        return [{"allOf": [either(part) for part in parts]}] if all(parts) else []


_NEGATED: dict[str, Callable[[Exclusion, Node, Any, Types], list[Any]]] = {
    "type": Exclusion._other_types,
    "enum": lambda _self, _node, value, types: _other_values(value, types),
    "const": lambda _self, _node, value, types: _other_values([value], types),
    "$ref": lambda self, node, _, types: self.negated(self._document.target(node), types),
    "allOf": lambda self, node, _, types: [
        one for part in self._document.children(node, "allOf") for one in self.negated(part, types)
    ],
    "anyOf": Exclusion._not_any,
    "not": lambda self, node, _, _types: [self._positive(self._document.child(node, "not"))],
    "required": lambda _self, _node, value, _types: [
        {"type": "object", "properties": {name: False}} for name in value
    ],
    "properties": lambda self, node, _, _types: [
        {"type": "object", "required": [name], "properties": {name: either(other)}}
        for name, one in self._document.named(node, "properties").items()
        if (other := self.negated(one, ALL_TYPES))
    ],
}


def above(value: float) -> dict[str, Any]:
    """Return the bound of numbers above a value.

    llguidance 1.7.6 and 1.9.1 include an exclusive bound that is whole, beside another bound less
    than 1 above it.
    """
    if value != int(value):
        return {"exclusiveMinimum": value}
    return {"minimum": value + _LITTLE if abs(value) < _EXACT else int(value) + 1}


def either(schemas: Sequence[Any]) -> Any:
    """Return the schema of what satisfies one of some schemas."""
    if any(one is True for one in schemas):
        return True
    if len(schemas) == 1:
        return schemas[0]
    return {"anyOf": list(schemas)} if schemas else False


def _schema(node: Node) -> dict[str, Any]:
    assert isinstance(node.schema, dict)
    return node.schema


def _values(nodes: Iterable[Node]) -> frozenset[Any] | None:
    """Return keys of the only values that schemas allow; None without such a list."""
    found: frozenset[Any] | None = None
    for schema in map(_schema, nodes):
        for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
            if values is not None:
                keys = frozenset(map(get_key, values))
                found = keys if found is None else found & keys
    return found


def matches(pattern: str, name: str, *, unclear: bool) -> bool:
    """Return whether a name fits; `unclear` for a class that Python's expressions lack."""
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return unclear


def _other_values(values: Sequence[Any], types: Types) -> list[Any]:
    """Return schemas of the values of `types` other than these."""
    kinds = frozenset(map(_type_of, values))
    free = types - kinds
    if kinds & _NUMBERS:
        free -= _NUMBERS
    if (names := named(free)) is None:
        raise NoNegationError("numbers that are no integers")
    found: list[Any] = [{"type": names}] if names else []
    if "boolean" in kinds & types:
        found += [
            {"const": value} for value in (True, False) if not any(item is value for item in values)
        ]
    if "string" in kinds & types:
        texts = [value for value in values if isinstance(value, str)]
        if sum(map(len, texts)) > _MOST_CHARACTERS:
            raise NoNegationError("an 'enum' of so many characters")
        found.append({"type": "string", "pattern": without(texts)})
    if kinds & _NUMBERS and types & _NUMBERS:
        numbers = {value for value in values if _type_of(value) in _NUMBERS}
        found += _other_numbers(sorted(numbers), types & _NUMBERS)
    if kinds & types & {"array", "object"}:
        raise NoNegationError("an 'enum' or 'const' of arrays or objects")
    return found


def _other_numbers(numbers: list[Any], types: Types) -> list[Any]:
    if len(numbers) > _MOST_NUMBERS:
        raise NoNegationError("an 'enum' of so many numbers")
    if types == {"fraction"}:
        raise NoNegationError("numbers that are no integers")
    kind = "number" if "fraction" in types else "integer"
    ends = [None, *numbers, None]
    found = list[Any]()
    for low, high in pairwise(ends):
        if kind == "integer" and low is not None and high is not None and int(high) - int(low) < 2:
            continue
        one: dict[str, Any] = {"type": kind}
        one |= {} if low is None else above(low)
        one |= {} if high is None else {"exclusiveMaximum": high}
        found.append(one)
    return found
