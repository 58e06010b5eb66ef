"""Numbers: ranges and multiples with a bounded number of digits.

Without a bound, a model may write digits until its answer is cut off. A number has at most
`INTEGER_DIGITS` before and `FRACTION_DIGITS` after its point, and no exponent. With an exclusive
bound both together are 15, so that the number is in the range as a double too (IEEE 754: a double
preserves 15 decimal digits).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor, inf, lcm, nextafter
from typing import Any

from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import NOT_ONE_OF, InexactError, SchemaDocument
from server.structured_outputs.rewriting.scalars.decimals import decimals
from server.structured_outputs.schema_walk import Schema

INTEGER_DIGITS = 15
FRACTION_DIGITS = 9
_MOST = Fraction(10**INTEGER_DIGITS - 1)
_LEAST = Fraction(1, 10**FRACTION_DIGITS)


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Multiples of `unit` from `low` to `high`; an open end is excluded."""

    unit: Fraction
    low: Fraction = -_MOST
    high: Fraction = _MOST
    low_open: bool = False
    high_open: bool = False
    whole: bool = False

    @classmethod
    def any(cls) -> NumberRange:
        """Return the range of all numbers."""
        return cls(_LEAST)

    def is_empty(self) -> bool:
        """Return True if it has no multiple of the unit."""
        return self.first() > self.last()

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

    def pattern(self) -> str | None:
        """Return a regular expression of a range without negative numbers.

        None unless its unit is a power of ten.
        """
        scale = self.unit.denominator
        places = len(str(scale)) - 1
        if self.unit.numerator != 1 or scale != 10**places:
            return None
        return decimals(int(self.first() * scale), int(self.last() * scale), places)

    def only(self) -> str | None:
        """Return the only number of the range, or None if it has several."""
        first = self.first()
        if first != self.last():
            return None
        text = format(Decimal(first.numerator) / Decimal(first.denominator), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text


def number_ranges(document: SchemaDocument, plain: Plain, *, whole: bool) -> list[NumberRange]:
    """Return the ranges of the numbers that satisfy all schemas; `whole` for integers."""
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
    return [item for item in ranges if not item.is_empty()]


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
