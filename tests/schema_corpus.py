"""Schemas as people write them: what a grammar follows, what is refused, what is hostile."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

_CORPUS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
GOOD: tuple[Schema, ...] = tuple(_CORPUS["good"])
"""A grammar follows them to the letter."""
BAD: tuple[tuple[Schema, str], ...] = tuple(map(tuple, _CORPUS["bad"]))
"""Refused, each for its own reason, of which a word is there."""
BAD_IN_TAGS: tuple[tuple[Schema, str], ...] = tuple(map(tuple, _CORPUS["bad_in_tags"]))
"""Refused in a structural tag that goes to xgrammar."""


# --------------------------------------------------------------------------------- schema generator
_WORDS = (
    "a",
    "id",
    "kind",
    "é",
    'q"x',
    "x\\y",
    "x y",
    "a/b",
    "",
    '"',
    "\\",
    "\n",
    "\x01",
    "\x7f",
    "😀",
)
_PATTERNS = (
    "^[a-z]{1,4}$",
    "[0-9]+-[0-9]{2}",
    "^(yes|no)$",
    "^\\w\\d?$",
    "^.{0,3}$",
    "^[^\\\\]{2}$",
    '^[^"]$',
    "^[\\x00-!a]{0,2}$",
    "^\\W?$",
    "^$",
    '^/|"$',
    "^[^a]*$",
)
_FORMATS = (
    *"date time date-time uuid ipv4 email duration hostname ipv6".split(),
    *"uri uri-reference iri uri-template json-pointer idn-hostname".split(),
)


class SchemaGenerator:
    """Makes schemas; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def plain(self, depth: int = 3) -> Schema:
        """A schema whose values tend to be short, and that a grammar can follow."""
        makers = [self._string, self._number, self._integer, self._choice, self._fixed]
        if depth > 0:
            makers += [self._object, self._object, self._array, self._union]
        return self._random.choice(makers)(depth)

    def wild(self, depth: int = 3) -> Schema:
        """Keywords at random, many of which a grammar cannot follow or that make no sense."""
        schema = self.plain(depth)
        for _ in range(self._random.randint(1, 3)):
            schema.update(self._random.choice(self._odd())(depth))
        return schema

    def combined(self, depth: int = 2) -> Schema:
        """Schemas that apply together, by choice or on a condition."""
        pick, plain = self._random, self.plain
        parts = [plain(depth - 1) for _ in range(3)]
        objects = [self._object(depth - 1) for _ in range(3)]
        name = pick.choice(_WORDS)
        flag = {"required": [name], "properties": {name: {"enum": ["red", 1]}}}
        makers: list[Schema] = [
            {"allOf": objects[:2]},
            {"allOf": [objects[0], {"minProperties": 1, "maxProperties": 2}]},
            {"oneOf": parts[:2]},
            {"oneOf": objects[:2]},
            {"anyOf": parts[:2], "not": parts[2]},
            {**objects[0], "not": objects[1]},
            {**objects[0], "if": flag, "then": objects[1], "else": objects[2]},
            {**objects[0], "if": objects[1], "then": False},
            {**objects[0], "dependentRequired": {name: pick.sample(_WORDS, 1)}},
            {**objects[0], "dependentSchemas": {name: objects[1]}},
            {**objects[0], "propertyNames": {"maxLength": 2}},
            {**objects[0], "allOf": [objects[1]], "unevaluatedProperties": False},
            {"type": "array", "items": parts[0], "contains": parts[1], "maxItems": 3},
            {"type": "array", "items": {"enum": [1, 2, "a"]}, "contains": {"const": "a"},
             "minContains": pick.randint(0, 2), "maxContains": 2, "minItems": pick.randint(0, 4)},
            {"type": "array", "items": self._choice(0), "uniqueItems": True,
             "minItems": pick.randint(0, 2), "maxItems": pick.randint(2, 4)},
            {"type": "string", "maxLength": 5, "format": pick.choice(_FORMATS),
             "pattern": pick.choice(_PATTERNS)},
            {"type": "string", "maxLength": 3, "not": {"enum": ["", "a", "ab", 1]}},
            {"type": "number", "minimum": -2, "maximum": 3, "not": {"enum": [0, 1.5, "a"]}},
            {**objects[0], "minProperties": pick.randint(0, 3), "maxProperties": 3},
            {**objects[0], "patternProperties": {"^x-": parts[0], "^[a-c]": parts[1]}},
        ]  # fmt: skip
        return pick.choice(makers)

    def overlapping(self, depth: int = 2) -> Schema:
        """Schemas that exclude what others allow: names, values, types and branches."""
        pick = self._random
        one, other = self._object(depth - 1), self._object(depth - 1)
        bare = {key: value for key, value in other.items() if key != "type"}
        branches = [
            True,
            {"minLength": 2},
            {"maxLength": 1},
            {"minimum": 2},
            {"pattern": "^a"},
            bare,
            {"type": "string"},
            {"const": "a"},
            {"required": [pick.choice(_WORDS)]},
            one,
            {"items": {"const": 1}},
            {"minItems": 2},
            {"prefixItems": [{"const": 1}]},
            {"type": "object", "minProperties": 2},
            {"format": "date"},
            {"pattern": "-01$"},
        ]
        types = pick.sample(("string", "integer", "object", "array", "null"), pick.randint(1, 3))
        words = pick.sample(_WORDS, 3)
        makers: list[Schema] = [
            {"oneOf": pick.sample(branches, pick.randint(1, 3))},
            {"type": types, "oneOf": pick.sample(branches, 2)},
            {"additionalProperties": True, "oneOf": pick.sample(branches, 2)},
            {"type": types, "not": {"oneOf": pick.sample(branches, 2)}},
            {"type": types, "not": {"not": {"anyOf": pick.sample(branches, 2)}}},
            {"minLength": 1, "allOf": [{"oneOf": pick.sample(branches, 2)}, {"type": types}]},
            {"properties": {words[0]: {"type": "integer"}}, "additionalProperties": True},
            {"type": "object", "not": {"required": [words[0]]}, "additionalProperties": True},
            {"type": "object", "dependentRequired": {words[0]: [words[1]]}},
            {"type": "object", "propertyNames": {"not": {"enum": words}}},
            {"type": "string", "not": {"enum": words}, "maxLength": pick.randint(1, 3)},
            {"type": "array", "items": {"enum": words}, "not": {"contains": {"const": words[0]}}},
            {**one, "not": {"not": other}, "unevaluatedProperties": False},
            {**one, "if": bare, "then": {"not": {"not": bare}}, "unevaluatedProperties": False},
            {**one, "additionalProperties": True, "not": {"properties": other["properties"]}},
            {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
             "items": [{"const": 1}], "additionalItems": {"enum": words}, "maxItems": 3},
            {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
             "exclusiveMinimum": True, "enum": [2, 3, 4, 5.0]},
            {"$schema": "http://json-schema.org/draft-07/schema#", "enum": [[1], [2], ["a"]],
             "items": [{"const": pick.choice((1, 2))}]},
        ]  # fmt: skip
        return pick.choice(makers)

    def _odd(self) -> list[Any]:
        pick = self._random
        return [
            lambda d: {"minLength": pick.randint(0, 9)},
            lambda d: {"maximum": pick.randint(-5, 5)},
            lambda d: {"multipleOf": pick.choice((2, 0.5, 3))},
            lambda d: {"required": pick.sample(_WORDS, 2)},
            lambda d: {"minProperties": pick.randint(0, 3)},
            lambda d: {"maxProperties": pick.randint(0, 3)},
            lambda d: {"additionalProperties": pick.choice((True, False, {"type": "integer"}))},
            lambda d: {"patternProperties": {pick.choice(_PATTERNS): self.plain(0)}},
            lambda d: {"propertyNames": {"pattern": pick.choice(_PATTERNS)}},
            lambda d: {"type": pick.choice(("string", "integer", "object", "array", "null"))},
            lambda d: {"type": pick.sample(("string", "integer", "number", "null"), 2)},
            lambda d: {"anyOf": [self.plain(0), self.plain(0)]},
            lambda d: {"oneOf": [self.plain(0), self.plain(0)]},
            lambda d: {"allOf": [self.plain(0)]},
            lambda d: {"not": self.plain(0)},
            lambda d: {"if": self.plain(0), "then": self.plain(0)},
            lambda d: {"contains": self.plain(0)},
            lambda d: {"uniqueItems": True},
            lambda d: {"minItems": pick.randint(0, 3), "maxItems": pick.randint(1, 4)},
            lambda d: {"prefixItems": [self.plain(0)], "items": self.plain(0)},
            lambda d: {"unevaluatedProperties": pick.choice((False, {"type": "integer"}))},
            lambda d: {"dependentRequired": {"a": ["id"]}},
            lambda d: {"enum": [1, "a", None, [1], {"a": 1}, 1.5]},
            lambda d: {"const": pick.choice((1, "a", None, True))},
            lambda d: {"format": pick.choice((*_FORMATS, "colour"))},
            lambda d: {"pattern": pick.choice((*_PATTERNS, "^(?=a)b$", "a$b"))},
            lambda d: {"description": "x", "title": "y", "default": 1, "x-own": {"type": 5}},
        ]

    def _string(self, _depth: int) -> Schema:
        pick = self._random
        kind = pick.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": pick.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": pick.choice(_FORMATS)}
        low = pick.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + pick.randint(0, 4)}

    def _number(self, _depth: int) -> Schema:
        low = self._random.choice((-3, 0, 0.5, 10, -1.25))
        keys = self._random.choice((("minimum", "maximum"), ("exclusiveMinimum", "maximum")))
        return {"type": "number", keys[0]: low, keys[1]: low + self._random.choice((1, 2.5, 100))}

    def _integer(self, _depth: int) -> Schema:
        low = self._random.randint(-20, 20)
        schema = {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 150)}
        return self._random.choice((schema, {"type": "integer", "multipleOf": 5}))

    def _choice(self, _depth: int) -> Schema:
        values = ["red", "a\nb", 1, None, True, 'é"', 2.5, "", "\\", '"', "/", "\x01", "😀", "x\\y"]
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _fixed(self, _depth: int) -> Schema:
        fixed = ({"const": {"a": [1, "x"]}}, {"type": "boolean"}, {"type": "null"}, {"const": "k"})
        return dict(self._random.choice(fixed))

    def _object(self, depth: int) -> Schema:
        pick = self._random
        names = pick.sample(_WORDS, pick.randint(1, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self.plain(depth - 1) for name in names},
            "required": [name for name in names if pick.random() < 0.7],
        }
        if pick.random() < 0.5:
            schema["additionalProperties"] = pick.choice((False, False, {"type": "boolean"}))
        return schema

    def _array(self, depth: int) -> Schema:
        low = self._random.randint(0, 2)
        schema: Schema = {
            "type": "array",
            "items": self.plain(depth - 1),
            "minItems": low,
            "maxItems": low + self._random.randint(0, 2),
        }
        if self._random.random() < 0.3:
            schema["prefixItems"] = [self.plain(0)]
            schema["maxItems"] = low + 2
        return schema

    def _union(self, depth: int) -> Schema:
        if self._random.random() < 0.3:
            return {"$ref": "#/$defs/node", "$defs": {"node": self.plain(depth - 1)}}
        return {"anyOf": [self.plain(depth - 1), self.plain(0)]}


# --------------------------------------------------------------------------------- schema instances
_VALUES: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2.5, "", "a", "x", 'a"b', "a\\b", [], {})
_SHORT = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\n": "\\n", "\t": "\\t"}


class InstanceGenerator:
    """Changes documents towards what a schema names; the same seed makes the same ones."""

    def __init__(self, schema: Any, seed: int) -> None:
        self._random = random.Random(seed)
        self._names: list[str] = ["a", "zz"]
        self._values: list[Any] = list(_VALUES)
        self._collect(schema)

    def near(self, documents: list[str], count: int) -> Iterator[str]:
        """Yield texts: values that the schema names, and changed documents."""
        values = [json.loads(text) for text in documents]
        for _ in range(count):
            value = self._random.choice([*values, *self._values])
            for _ in range(self._random.randint(0, 2)):
                value = self._changed(value)
            yield self._spelled(value)

    def _collect(self, schema: Any) -> None:
        if isinstance(schema, list):
            for item in schema:
                self._collect(item)
        if not isinstance(schema, dict):
            return
        for key, value in schema.items():
            if key == "enum":
                self._values += value
            elif key == "const":
                self._values.append(value)
            elif key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                self._values += [value, value + 1, value - 1]
            elif key in ("required", "properties", "dependentRequired", "dependentSchemas"):
                self._names += value
            self._collect(value)

    def _changed(self, value: Any) -> Any:
        pick = self._random
        if isinstance(value, dict) and value and pick.random() < 0.8:
            return self._changed_object(value)
        if isinstance(value, dict):
            return {pick.choice(self._names): pick.choice(self._values)}
        if isinstance(value, list) and pick.random() < 0.8:
            items = list(value)
            if items and pick.random() < 0.5:
                place = pick.randrange(len(items))
                items[place] = self._changed(items[place])
                return items
            items.insert(pick.randint(0, len(items)), pick.choice([*items, *self._values]))
            return items
        return pick.choice(self._values)

    def _changed_object(self, value: dict[str, Any]) -> dict[str, Any]:
        pick = self._random
        pairs = list(value.items())
        place = pick.randrange(len(pairs))
        kind = pick.randrange(4)
        if kind == 0:
            pairs[place] = (pick.choice(self._names), pairs[place][1])
        elif kind == 1:
            pairs[place] = (pairs[place][0], self._changed(pairs[place][1]))
        elif kind == 2:
            del pairs[place]
        else:
            pairs.insert(place, (pick.choice(self._names), pick.choice(self._values)))
        return dict(pairs)

    def _spelled(self, value: Any) -> str:
        """Return a text of the value in which characters may be escaped that need not be."""
        if isinstance(value, dict):
            pairs = (f"{self._string(key)}: {self._spelled(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, list):
            return f"[{', '.join(map(self._spelled, value))}]"
        return self._string(value) if isinstance(value, str) else json.dumps(value)

    def _string(self, text: str) -> str:
        plain = json.dumps(text, ensure_ascii=False)
        if self._random.random() < 0.7:
            return plain
        return f'"{"".join(map(self._escaped, text))}"'

    def _escaped(self, character: str) -> str:
        if self._random.random() < 0.4 and character >= " " and character not in '"\\':
            return character
        if character in _SHORT and self._random.random() < 0.5:
            return _SHORT[character]
        form = "{:04x}" if self._random.random() < 0.5 else "{:04X}"
        units = character.encode("utf-16-be", "surrogatepass")
        pairs = (units[place : place + 2] for place in range(0, len(units), 2))
        return "".join(f"\\u{form.format(int.from_bytes(pair))}" for pair in pairs)
