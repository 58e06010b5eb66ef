"""Numbers: ranges and multiples with a bounded number of digits.

Without a bound, a model may write digits until its answer is cut off. A number has at most
`INTEGER_DIGITS` before and `FRACTION_DIGITS` after its point, and no exponent. With an exclusive
bound, or multiples that are excluded, both together are 15, so that the number satisfies the schema
as a double too (IEEE 754: a double preserves 15 decimal digits).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor, inf, lcm, nextafter
from typing import Any

from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import (
    NOT_MULTIPLES,
    NOT_ONE_OF,
    InexactError,
    SchemaDocument,
)
from server.structured_outputs.rewriting.scalars.decimals import decimals
from server.structured_outputs.schema_walk import Schema

INTEGER_DIGITS = 15
FRACTION_DIGITS = 9
_LONG = rf"[0-9.]{{{INTEGER_DIGITS + 2},}}"
_MOST = Fraction(10**INTEGER_DIGITS - 1)
_LEAST = Fraction(1, 10**FRACTION_DIGITS)


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Multiples of `unit` from `low` to `high`; an open end is excluded.

    Numbers are no multiples of the steps in `apart`, each of which is a power of ten.
    """

    unit: Fraction
    low: Fraction = -_MOST
    high: Fraction = _MOST
    low_open: bool = False
    high_open: bool = False
    whole: bool = False
    apart: tuple[Fraction, ...] = ()

    @classmethod
    def any(cls) -> NumberRange:
        """Return the range of all numbers."""
        return cls(_LEAST)

    def is_empty(self) -> bool:
        """Return True if it has no multiple of the unit."""
        if self.first() > self.last():
            return True
        # All of its numbers are multiples of a step, or its only number is.
        numbers = (self.unit, self.first()) if self.first() == self.last() else (self.unit,)
        return any(number % step == 0 for step in self.apart for number in numbers)

    def first(self) -> Fraction:
        """Return the lowest multiple in the range."""
        steps = self.low / self.unit
        return self.unit * (floor(steps) + 1 if self.low_open else ceil(steps))

    def last(self) -> Fraction:
        """Return the highest multiple in the range."""
        steps = self.high / self.unit
        return self.unit * (ceil(steps) - 1 if self.high_open else floor(steps))

    def above(self, bound: Fraction, *, open_: bool) -> NumberRange:
        """Return the part above `bound`."""
        if bound < self.low or (bound == self.low and not open_):
            return self
        return replace(self, low=bound, low_open=open_)

    def below(self, bound: Fraction, *, open_: bool) -> NumberRange:
        """Return the part below `bound`."""
        if bound > self.high or (bound == self.high and not open_):
            return self
        return replace(self, high=bound, high_open=open_)

    def mirrored(self) -> NumberRange:
        """Return the range of the negated numbers."""
        return replace(
            self, low=-self.high, high=-self.low, low_open=self.high_open, high_open=self.low_open
        )

    def schema(self) -> Schema:
        """Return llguidance's schema of a range without negative numbers.

        Its low end is inclusive: llguidance 1.7.6 admits an exclusive integer bound if the other
        end is less than 1 away (`rx_float_range` in numeric.rs).
        """
        found: Schema = {"type": "integer" if self.whole else "number"}
        found["minimum"] = _double(self.first(), inf)
        if self.high_open:
            found["exclusiveMaximum"] = _double(self.high, -inf)
        else:
            found["maximum"] = _double(self.last(), -inf)
        if not self.whole or self.unit != 1:
            found["multipleOf"] = _double(self.unit, inf)
        return found

    @property
    def is_decimal(self) -> bool:
        """True if the unit is 1 or a negative power of ten."""
        return self.unit.numerator == 1 and _is_power_of_ten(self.unit)

    def any_pattern(self) -> str | None:
        """Return a regular expression, with the sign, of a range without bounds; else None."""
        if not self.is_decimal or replace(self, apart=()) != NumberRange(
            self.unit, whole=self.whole
        ):
            return None
        places = len(str(self.unit.denominator)) - 1
        return rf"-?(?:0|[1-9][0-9]{{0,{INTEGER_DIGITS - 1}}})" + (
            rf"(?:\.[0-9]{{1,{places}}})?" if places else ""
        )

    def pattern(self) -> str | None:
        """Return a regular expression of a range without negative numbers.

        None unless its unit is a power of ten.
        """
        if not self.is_decimal:
            return None
        scale = self.unit.denominator
        first, last = int(self.first() * scale), int(self.last() * scale)
        return decimals(first, last, len(str(scale)) - 1)

    def excluded(self) -> str | None:
        """Return a regular expression of the multiples of `apart`; None without any.

        It has all numbers of more digits than a double preserves, since they may round to one.
        """
        return "|".join((*map(_multiples, self.apart), _LONG)) if self.apart else None

    def only(self) -> str | None:
        """Return the only number of the range, or None if it has several."""
        first = self.first()
        if first != self.last():
            return None
        text = format(Decimal(first.numerator) / Decimal(first.denominator), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text


def number_ranges(document: SchemaDocument, plain: Plain, *, whole: bool) -> list[NumberRange]:
    """Return the ranges of the numbers that satisfy all schemas; `whole` for integers."""
    if all(_NUMERIC.isdisjoint(schema) for schema in plain):
        return [_EVERY_INTEGER if whole else _EVERY_NUMBER]
    try:
        unit = _unit(plain, whole=whole)
    except InexactError as error:
        document.leave_out(plain[0], error)
        unit = Fraction(1) if whole else _LEAST
    ranges = [_bounded(NumberRange(unit, whole=whole), plain)]
    for schema in plain:
        for value in schema.get(NOT_ONE_OF, ()):
            if isinstance(value, int | float) and not isinstance(value, bool):
                ranges = [part for item in ranges for part in _split(item, exact(value))]
    if not document.wide:
        ranges = [_fewer_digits(item) for item in ranges]
    ranges = _without_multiples(document, plain, ranges)
    return [item for item in ranges if not item.is_empty()]


_NUMERIC = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *(NOT_ONE_OF, NOT_MULTIPLES),
    )
)
_EVERY_NUMBER, _EVERY_INTEGER = NumberRange(_LEAST), NumberRange(Fraction(1), whole=True)


def _without_multiples(
    document: SchemaDocument, plain: Plain, ranges: list[NumberRange]
) -> list[NumberRange]:
    """Return the ranges without the multiples that schemas exclude."""
    for schema in plain:
        for value in schema.get(NOT_MULTIPLES, ()):
            step = exact(value)
            if not _is_power_of_ten(step):
                document.leave_out(
                    schema, f"'not' of 'multipleOf' is supported for powers of ten, not for {value}"
                )
            elif not all(item.is_decimal for item in ranges):
                document.leave_out(
                    schema, "'not' of 'multipleOf' cannot stand beside a 'multipleOf' of its own"
                )
            else:
                ranges = [replace(item, apart=(*item.apart, step)) for item in ranges]
    return ranges


def _is_power_of_ten(step: Fraction) -> bool:
    return str(step if step >= 1 else 1 / step).strip("0") == "1"


def _multiples(step: Fraction) -> str:
    """Return a regular expression of the multiples of a power of ten, without their sign."""
    if step >= 1:
        zeros = len(str(step)) - 1
        return rf"(?:[0-9]*0{{{zeros}}}|0)(?:\.0*)?" if zeros else r"[0-9]+(?:\.0*)?"
    places = len(str(1 / step)) - 1
    return rf"[0-9]+(?:\.[0-9]{{0,{places}}}0*)?"


def signed_parts(item: NumberRange) -> list[tuple[str, NumberRange]]:
    """Return the range as pairs of a sign and a range without negative numbers."""
    # llguidance supports no negative multiples.
    zero = Fraction(0)
    parts = (("", item.above(zero, open_=False)), ("-", item.mirrored().above(zero, open_=True)))
    return [(sign, part) for sign, part in parts if not part.is_empty()]


def exact(value: Any) -> Fraction:
    """Return the exact decimal value of a JSON number."""
    return Fraction(str(value))


def _double(value: Fraction, towards: float) -> int | float:
    """Return the number, or the next double in a direction if no double equals its decimal."""
    if value.denominator == 1:
        return int(value)
    found = float(value)
    beyond = exact(found) < value if towards > 0 else exact(found) > value
    return nextafter(found, towards) if beyond else found


def _unit(plain: Plain, *, whole: bool) -> Fraction:
    steps = [exact(schema["multipleOf"]) for schema in plain if "multipleOf" in schema]
    if whole:
        steps.append(Fraction(1))
    if not steps:
        return _LEAST
    scale = lcm(*(step.denominator for step in steps))
    unit = Fraction(lcm(*(int(step * scale) for step in steps)), scale)
    if 10**FRACTION_DIGITS % unit.denominator:
        raise InexactError(
            f"'multipleOf' has more than {FRACTION_DIGITS} digits after the point; round it"
        )
    return unit


def _bounded(item: NumberRange, plain: Plain) -> NumberRange:
    for schema in plain:
        for keyword, open_ in (("minimum", False), ("exclusiveMinimum", True)):
            if keyword in schema:
                item = item.above(exact(schema[keyword]), open_=open_)
        for keyword, open_ in (("maximum", False), ("exclusiveMaximum", True)):
            if keyword in schema:
                item = item.below(exact(schema[keyword]), open_=open_)
    return item


def _split(item: NumberRange, value: Fraction) -> list[NumberRange]:
    parts = item.below(value, open_=True), item.above(value, open_=True)
    return [part for part in parts if not part.is_empty()]


def _fewer_digits(item: NumberRange) -> NumberRange:
    """Return the range with a unit that doubles can distinguish from its open ends."""
    ends = [abs(item.low)] * item.low_open + [abs(item.high)] * item.high_open
    if item.unit != _LEAST or not ends:
        return item
    places = max(0, INTEGER_DIGITS - len(str(int(max(ends)))))
    return replace(item, unit=Fraction(1, 10 ** min(places, FRACTION_DIGITS)))
