"""Characters of strings as a grammar writes them: each has one spelling in JSON.

Quotes, backslashes, control characters and DEL are escaped; all others are written as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from re import _constants as code  # type: ignore[attr-defined]
from typing import Any

_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_ESCAPED = frozenset((*range(0x20), 0x7F, *_SHORT))
"""Code points that JSON strings of a grammar escape."""
_ESCAPED_CLASS = r"\x00-\x1f\x7f\x22\x5c"
_PLAIN = f"[^{_ESCAPED_CLASS}]"
NOTHING = "[a&&b]"
"""A regular expression that matches no text."""

_SPACE = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_WIDE_SPACE = rf"{_SPACE}\x1c-\x1f\x{{85}}\x{{feff}}"
_SPACES = frozenset(range(9, 14))
_WIDE_SPACES = _SPACES | frozenset(range(0x1C, 0x20))


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """A set of characters: the text of a class, and its members among the escaped ones."""

    text: str
    escaped: frozenset[int]


# Characters by both readings, and by either: Python's `re` and ECMA-262 differ.
_CATEGORIES = {
    code.CATEGORY_DIGIT: (
        CharacterClass("0-9", frozenset()),
        CharacterClass(r"\p{Nd}", frozenset()),
    ),
    code.CATEGORY_NOT_DIGIT: (
        CharacterClass(r"[^\p{Nd}]", _ESCAPED),
        CharacterClass("[^0-9]", _ESCAPED),
    ),
    code.CATEGORY_WORD: (
        CharacterClass("0-9A-Za-z_", frozenset()),
        CharacterClass(r"\p{L}\p{M}\p{N}_", frozenset()),
    ),
    code.CATEGORY_NOT_WORD: (
        CharacterClass(r"[^\p{L}\p{M}\p{N}_]", _ESCAPED),
        CharacterClass("[^0-9A-Za-z_]", _ESCAPED),
    ),
    code.CATEGORY_SPACE: (
        CharacterClass(_SPACE, _SPACES),
        CharacterClass(_WIDE_SPACE, _WIDE_SPACES),
    ),
    code.CATEGORY_NOT_SPACE: (
        CharacterClass(f"[^{_WIDE_SPACE}]", _ESCAPED - _WIDE_SPACES),
        CharacterClass(f"[^{_SPACE}]", _ESCAPED - _SPACES),
    ),
}
_COMPLEMENTS = (
    {code.CATEGORY_DIGIT, code.CATEGORY_NOT_DIGIT},
    {code.CATEGORY_WORD, code.CATEGORY_NOT_WORD},
    {code.CATEGORY_SPACE, code.CATEGORY_NOT_SPACE},
)


def literal(point: int) -> str:
    """Return a character as written inside a class, and outside where it is not escaped."""
    return chr(point) if chr(point).isalnum() and point < 128 else f"\\x{{{point:x}}}"


def escaped(text: str) -> str:
    """Return a regular expression that matches this text, without JSON's escapes."""
    return "".join(literal(ord(character)) for character in text)


def spelled(text: str) -> str:
    """Return a regular expression that matches the JSON spelling of this text."""
    return text.translate(_SPELLINGS)


class _Spellings(dict[int, str]):
    """Regular expressions of the JSON spellings of code points; those of ASCII are kept."""

    def __missing__(self, point: int) -> str:
        found = _escape(point) if point in _ESCAPED else literal(point)
        if point < 128:
            self[point] = found
        return found


_SPELLINGS = _Spellings()


def class_of(items: Iterable[Any], *, wide: bool = False) -> str:
    """Return a regular expression of the JSON spellings of a class of Python's parser.

    A `wide` one has all characters that Python's `re` or ECMA-262 has, others those of both.
    """
    items = list(items)
    negated = bool(items) and items[0][0] is code.NEGATE
    items = items[1:] if negated else items
    named = {value for kind, value in items if kind is code.CATEGORY}
    if any(pair <= named for pair in _COMPLEMENTS):
        return NOTHING if negated else ANY
    parts = [_part(kind, value, wide=negated is not wide) for kind, value in items]
    return _spelled_class(
        "".join(part.text for part in parts),
        frozenset[int]().union(*(part.escaped for part in parts)),
        negated=negated,
    )


def all_but(points: Iterable[int]) -> str:
    """Return a regular expression of the JSON spellings of all characters except these."""
    left_out = frozenset(points)
    text = "".join(map(literal, sorted(left_out)))
    return _spelled_class(text, left_out & _ESCAPED, negated=True)


def _part(kind: Any, value: Any, *, wide: bool) -> CharacterClass:
    if kind is code.LITERAL:
        return CharacterClass(literal(value), _ESCAPED & {value})
    if kind is code.RANGE:
        low, high = value
        inside = frozenset(point for point in _ESCAPED if low <= point <= high)
        return CharacterClass(f"{literal(low)}-{literal(high)}", inside)
    narrow, either = _CATEGORIES[value]
    return either if wide else narrow


def _spelled_class(text: str, inside: frozenset[int], *, negated: bool) -> str:
    if negated:
        plain, inside = f"[^{text}{_ESCAPED_CLASS}]", _ESCAPED - inside
    elif not text:
        return NOTHING
    else:
        plain = f"[{text}&&{_PLAIN}]" if inside else f"[{text}]"
    return f"(?:{plain}|{_escapes(inside)})" if inside else plain


def _escapes(points: frozenset[int]) -> str:
    """Return a regular expression of the escapes of these code points."""
    short = "".join(literal(ord(_SHORT[point])) for point in sorted(points) if point in _SHORT)
    found = [rf"\x5c[{short}]"] if short else []
    for high in (0, 1, 7):
        lows = [f"{point % 16:x}" for point in sorted(points - _SHORT.keys()) if point >> 4 == high]
        found += [rf"\x5cu00{high}[{''.join(lows)}]"] if lows else []
    return "|".join(found)


def _escape(point: int) -> str:
    return rf"\x5c{literal(ord(_SHORT[point]))}" if point in _SHORT else rf"\x5cu00{point:02x}"


ANY = f"(?:{_PLAIN}|{_escapes(_ESCAPED)})"
"""A regular expression of the JSON spelling of any character."""
EITHER_LINE_END = (0x0A, 0x0D, 0x2028, 0x2029)
"""Characters that `.` does not match in ECMA-262; in Python's `re` it is the first alone."""
WORD, NO_WORD = code.CATEGORY_WORD, code.CATEGORY_NOT_WORD
