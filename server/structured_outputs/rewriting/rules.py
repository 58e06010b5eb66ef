"""Text of the grammar: a rule for each node, in the Lark dialect of llguidance 1.7.

Strings are terminals (`scalars/languages.py`). Multiples that are no decimals are written as
`%json`, whose ranges llguidance does not unroll. All other rules are written here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.containers.array_counts import count_steps
from server.structured_outputs.rewriting.containers.counts import CountRange, several
from server.structured_outputs.rewriting.containers.object_rules import Member, ObjectRules
from server.structured_outputs.rewriting.document import Node
from server.structured_outputs.rewriting.scalars.languages import ALL, Language
from server.structured_outputs.rewriting.scalars.numbers import NumberRange, signed_parts
from server.structured_outputs.rewriting.scalars.texts import in_quotes
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
from server.structured_outputs.schema_walk import Schema

MARK = "%llguidance {}\n"
"""First line of a grammar for llguidance."""
MAX_INDENT = 32
"""Most blanks after a line end between two parts of JSON: 8 levels of 4. Without a line end, one
blank is allowed. Without a bound, a model could fill its context with blanks."""
MAX_INLINE = 24
"""Most characters of a literal that is repeated where its value may stand."""
MAX_RULES = 20_000
_BLANK = rf"( |\n {{0,{MAX_INDENT}}})?"

NameOf = Callable[[Node], str | None]
"""Returns the rule of a node; None if no value satisfies it."""


class Rules:
    """Collects the rules of one grammar; `compact` allows no whitespace."""

    def __init__(self, *, compact: bool) -> None:
        blank = "" if compact else _BLANK
        self._marks = [
            *(rf"{name}: /{sign}{blank}/" for name, sign in (("OPEN", r"\{"), ("BEGIN", r"\["))),
            *(rf"{name}: /{blank}{sign}/" for name, sign in (("CLOSE", r"\}"), ("END", r"\]"))),
            *(
                rf"{name}: /{blank}{sign}{blank}/"
                for name, sign in (("COLON", ":"), ("COMMA", ","))
            ),
        ]
        self._compact = compact
        self._lines: list[str] = []
        self._any: str | None = None
        self._terminals: dict[str, str] = {}

    def text_terminal(self, language: Language) -> str:
        """Return the terminal of the strings of a language.

        A trial of the grammar walks through each terminal that is named `TEXT`.
        """
        stem = "STRING" if language.has_any_characters else "TEXT"
        return self.terminal(in_quotes(language), stem)

    def terminal(self, expression: str, stem: str) -> str:
        """Return the name of a terminal with this expression."""
        if expression not in self._terminals:
            self._terminals[expression] = self.add(stem, expression)
        return self._terminals[expression]

    def add(self, stem: str, *options: str, counts: bool = False) -> str:
        """Add a rule of these options and return its name; `counts`: it has a parameter."""
        name = self.new_name(stem)
        self.define(name, *options, counts=counts)
        return name

    def new_name(self, stem: str) -> str:
        """Return a name that no rule has."""
        return f"{stem}_{len(self._lines)}"

    def define(self, name: str, *options: str, counts: bool = False) -> None:
        """Add a rule of this name."""
        if len(self._lines) >= MAX_RULES:
            raise UnusableError(
                f"its grammar has more than {MAX_RULES} rules, the limit of this server"
            )
        parameter = "::_" if counts else ""
        self._lines.append(
            f"{name}{parameter}: " + "\n  | ".join(option or '""' for option in options)
        )

    def text(self, start: str) -> str:
        """Return the grammar that begins with the rule `start`."""
        rules = "\n".join([*self._lines, ""])
        marks = [line for line in self._marks if line[: line.index(":")] in rules]
        return "\n".join([f"{MARK}start: {start}", *marks, rules])

    def scalar(self, shapes: Sequence[Shape]) -> str | None:
        """Return the terminal or short literal of a value without parts; None if it needs a rule.

        Each rule takes llguidance about 10 µs.
        """
        if len(shapes) != 1 or not isinstance(shapes[0], Text | Number | FixedValue):
            return None
        match self.of_shape(shapes[0], lambda _: None):
            case [str(text)] if text.isidentifier() or len(text) <= MAX_INLINE:
                return text
        return None

    def of_shape(self, shape: Shape, name_of: NameOf) -> list[str]:
        """Return the options of the shape's rule; none if no value has the shape."""
        match shape:
            case AnyValue():
                return [self.anything()]
            case FixedValue(value):
                return [self.fixed(value)]
            case Text(language):
                return [self.text_terminal(language)]
            case Number(range):
                return self._number(range)
            case Array():
                return self._array(shape, name_of)
            case CountedArray():
                return self._counted(shape, name_of)
            case Object():
                return self._object(shape, name_of)

    def anything(self) -> str:
        """Return the rule of every JSON value."""
        if self._any is None:
            self._any = "anything"
            text, any_ = self.text_terminal(ALL), self._any
            self.define(
                any_,
                *('"null"', '"true"', '"false"', text, *self._number(_ANY_NUMBER)),
                f"BEGIN ({any_} (COMMA {any_})*)? END",
                f"OPEN ({text} COLON {any_} (COMMA {text} COLON {any_})*)? CLOSE",
            )
        return self._any

    def fixed(self, value: Any) -> str:
        """Return a value as a literal of the grammar."""
        return quoted(_json(value, compact=self._compact))

    def _number(self, item: NumberRange) -> list[str]:
        return [
            self.terminal(text, "NUMBER") if is_terminal else text
            for is_terminal, text in _number_options(item)
        ]

    def _array(self, shape: Array, name_of: NameOf) -> list[str]:
        if shape.chosen is not None:
            return self._chosen(shape, shape.chosen)
        first = [name_of(node) for node in shape.first]
        rest = None if shape.rest is None else name_of(shape.rest)
        if None in first:
            # The array ends before an item that cannot exist.
            first, rest = first[: first.index(None)], None
        most = shape.most
        if rest is None:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and shape.least > most:
            return []
        return [f"BEGIN {self._items(first, rest, shape.least, most)} END"]

    def _items(self, first: list[Any], rest: str | None, least: int, most: int | None) -> str:
        """Return the items between the brackets, built from the last to the first."""
        count = len(first) if most is None else min(len(first), most)
        tail = '""'
        if rest is not None and (most is None or most > count):
            before = max(count, 1)
            tail = several(f"COMMA {rest}", least - before, None if most is None else most - before)
            if count == 0:
                return f"{rest} {tail}" if least else f"({rest} {tail})?"
        for index in range(count - 1, -1, -1):
            comma = "COMMA " if index else ""
            part = f"{comma}{first[index]} {tail}"
            tail = part if index < least else f"({part})?"
        return tail

    def _chosen(self, shape: Array, values: tuple[Any, ...]) -> list[str]:
        """Return the rule of items that differ: a bit for each used value."""
        most = len(values) if shape.most is None else min(shape.most, len(values))
        if shape.least > most:
            return []
        if not values:
            return ["BEGIN END"]
        stem = f"unique_{len(self._lines)}"
        bits = f"[0:{len(values)}]"
        self.define(
            f"{stem}i",
            *(f"{self.fixed(value)} {stem}n::set_bit({index}) %if bit_clear({index})"
              for index, value in enumerate(values)),
            counts=True,
        )  # fmt: skip
        self.define(
            f"{stem}n",
            f'"" %if bit_count_ge({bits}, {shape.least})',
            f"COMMA {stem}i::_ %if bit_count_lt({bits}, {most})",
            counts=True,
        )
        found = [f"BEGIN {stem}i::0 END"] if most else []
        return found if shape.least else [*found, "BEGIN END"]

    def _counted(self, shape: CountedArray, name_of: NameOf) -> list[str]:
        """Return the rule of `contains`: one for each valid combination of counts."""
        steps = count_steps(shape, lambda node: name_of(node) is not None)
        start = (0,) * (1 + len(shape.contained))
        if start not in steps:
            return []
        stem = f"contains_{len(self._lines)}"
        names = {counts: "_".join(map(str, (stem, *counts))) for counts in steps}
        for counts, (items, ends) in steps.items():
            comma = "COMMA " if counts[0] else ""
            options = [f"{comma}{name_of(node)} {names[after]}" for node, after in items]
            self.define(names[counts], *options, *([""] if ends else []))
        return [f"BEGIN {names[start]} END"]

    def _object(self, shape: Object, name_of: NameOf) -> list[str]:
        listed = []
        for item in shape.properties:
            value = name_of(item.node)
            if value is not None:
                listed.append(Member(f"{quoted(_json(item.name))} COLON {value}", item.required))
            elif item.required:
                return []
        pairs = [(name_of(name), name_of(value)) for name, value in shape.others]
        others = [f"{name} COLON {value}" for name, value in pairs if name and value]
        other = self.add("other", *others) if others else None
        last = None
        if shape.last is not None:
            name, value = map(name_of, shape.last)
            if name is None or value is None:
                return []
            last = f"{name} COLON {value}"
        bounds = CountRange(shape.least, shape.most)
        return ObjectRules(self, listed, other, bounds, last).options(any_order=shape.any_order)


def _json(value: Any, *, compact: bool = False) -> str:
    """Return the only spelling of a value; DEL is escaped, as in llguidance's strings."""
    text = (_COMPACT if compact else _SPACED).encode(value)
    return text.replace("\x7f", "\\u007f")


def quoted(text: str) -> str:
    """Return a literal of the grammar."""
    return _SPACED.encode(text)


def scalar(schema: Schema) -> str:
    """Return the rule of the numbers of a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})


@functools.lru_cache(1024)
def _number_options(item: NumberRange) -> tuple[tuple[bool, str], ...]:
    """Return the options of a range's rule, each with True for the expression of a terminal."""
    excluded = item.excluded()
    apart = f" & ~/-?(?:{excluded})/" if excluded else ""
    if (pattern := item.any_pattern()) is not None:
        return ((True, f"/{pattern}/{apart}"),)
    found = []
    for sign, part in signed_parts(item):
        pattern, only = part.pattern(), part.only()
        if pattern is not None:
            found.append((True, f"/{sign}(?:{pattern})/{apart}"))
        elif only is not None:
            found.append((False, quoted(sign + only)))
        else:
            found.append((False, f"{quoted(sign)} {scalar(part.schema())}".removeprefix('"" ')))
    return tuple(found)


_SPACED = json.JSONEncoder(ensure_ascii=False)
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_ANY_NUMBER = NumberRange.any()
