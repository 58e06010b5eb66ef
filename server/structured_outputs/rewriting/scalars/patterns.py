"""Translation of regular expressions from ECMA-262, as in JSON Schema, to llguidance's syntax.

ECMA-262 and Python's `re`, which most validators use, differ about some classes (`\\d`, `\\w`,
`\\s`). A translated class has the characters that both have.

derivre 0.3.12 adds an escaped quote and backslash to a class that has all control characters
(`quote_all_ctrl` in its regexbuilder.rs). Therefore a class that lacks one of the two gets no NUL,
and no pattern matches NUL alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from server.structured_outputs.rewriting.document import InexactError

_SPACE = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_WIDE_SPACE = rf"{_SPACE}\x1c-\x1f\x{{85}}\x{{feff}}"
# Characters by both readings, and by either.
_CLASSES = {
    code.CATEGORY_DIGIT: ("0-9", r"\p{Nd}"),
    code.CATEGORY_NOT_DIGIT: (r"[^\p{Nd}]", "[^0-9]"),
    code.CATEGORY_WORD: ("0-9A-Za-z_", r"\p{L}\p{M}\p{N}_"),
    code.CATEGORY_NOT_WORD: (r"[^\p{L}\p{M}\p{N}_]", "[^0-9A-Za-z_]"),
    code.CATEGORY_SPACE: (_SPACE, _WIDE_SPACE),
    code.CATEGORY_NOT_SPACE: (f"[^{_WIDE_SPACE}]", f"[^{_SPACE}]"),
}
_NO_LINE_END = r"[^\n\r\x{2028}\x{2029}]"
_NO_NEWLINE = r"[^\n]"
_NOTHING = "[a&&b]"
_NUL = 0
_ESCAPED = tuple(map(ord, '"\\'))
_COMPLEMENTS = (
    {code.CATEGORY_DIGIT, code.CATEGORY_NOT_DIGIT},
    {code.CATEGORY_WORD, code.CATEGORY_NOT_WORD},
    {code.CATEGORY_SPACE, code.CATEGORY_NOT_SPACE},
)
_NEGATIVE_CATEGORIES = (
    *(code.CATEGORY_NOT_DIGIT, code.CATEGORY_NOT_WORD, code.CATEGORY_NOT_SPACE),
)
_MAX_WORD = 200


def translated(pattern: str, *, wide: bool = False) -> str:
    """Return the pattern in llguidance's syntax; it still matches anywhere in a text.

    A `wide` one matches every text that Python's `re` or ECMA-262 matches. Raises `InexactError`
    for an invalid pattern, and for parts that no automaton can follow.
    """
    try:
        tree = parser.parse(re.sub(r"\(\?<(?![=!])", "(?P<", pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise InexactError(f"the pattern {pattern!r} is no regular expression: {error}") from None
    if tree.state.flags & ~re.UNICODE:
        raise InexactError(f"the pattern {pattern!r} has flags; spell both cases out")
    return _Translation(pattern, wide).sequence(tree, first=True, last=True)


def whole(pattern: str) -> str:
    """Return a pattern of llguidance's syntax that matches whole texts only."""
    return f"^(?:{pattern})$"


def escaped(text: str) -> str:
    """Return a pattern of llguidance's syntax that matches this text."""
    return "".join(_literal(ord(character)) for character in text)


def other_than(words: set[str]) -> str:
    """Return a pattern, of llguidance's syntax, of all texts except these."""
    longest = max(map(len, words))
    if longest > _MAX_WORD:
        raise InexactError(
            f"a text of {longest} characters is excluded; the limit is {_MAX_WORD} characters"
        )
    return whole(_others(words))


def _others(words: set[str]) -> str:
    heads: dict[str, set[str]] = {}
    for word in words:
        if word:
            heads.setdefault(word[0], set()).add(word[1:])
    options = [] if "" in words else [""]
    options.append(f"{_all_but(map(ord, heads))}(?s:.*)" if heads else "(?s:.+)")
    options += [f"{_character(ord(head))}(?:{_others(tails)})" for head, tails in heads.items()]
    return "|".join(options)


def _literal(point: int) -> str:
    """Return a character as written inside a class."""
    return chr(point) if chr(point).isalnum() and point < 128 else f"\\x{{{point:x}}}"


def _character(point: int) -> str:
    return _NOTHING if point == _NUL else _literal(point)


def _all_but(points: Iterable[int]) -> str:
    """Return the class of all characters except these."""
    left_out = set(points)
    if left_out.intersection(_ESCAPED):
        left_out.add(_NUL)
    return f"[^{''.join(map(_literal, sorted(left_out)))}]"


@dataclass(frozen=True, slots=True)
class _Translation:
    """Translates one pattern."""

    pattern: str
    wide: bool

    def sequence(self, items: Any, *, first: bool, last: bool) -> str:
        """Return items in sequence; `first`, `last`: at the start or end of the whole pattern."""
        found, items = [], list(items)
        for index, (kind, value) in enumerate(items):
            begins = first and all(_is_anchor(item) for item in items[:index])
            ends = last and all(_is_anchor(item) for item in items[index + 1 :])
            found.append(self._item(kind, value, begins, ends))
        return "".join(found)

    def _item(self, kind: Any, value: Any, begins: bool, ends: bool) -> str:
        if kind is code.LITERAL:
            return _literal(value) if self.wide else _character(value)
        if kind is code.NOT_LITERAL:
            return f"[^{_literal(value)}]" if self.wide else _all_but([value])
        if kind is code.ANY:
            return _NO_NEWLINE if self.wide else _NO_LINE_END
        if kind is code.IN:
            return _class(value, wide=self.wide)
        if kind is code.AT:
            return self._anchor(value, begins, ends)
        return self._group(kind, value, begins, ends)

    def _group(self, kind: Any, value: Any, begins: bool, ends: bool) -> str:
        if kind is code.BRANCH:
            branches = (self.sequence(item, first=begins, last=ends) for item in value[1])
            return f"(?:{'|'.join(branches)})"
        if kind is code.SUBPATTERN:
            _, added, removed, inner = value
            if not added and not removed:
                return f"(?:{self.sequence(inner, first=begins, last=ends)})"
        if kind in (code.MAX_REPEAT, code.MIN_REPEAT):
            low, high, inner = value
            most = "" if high is code.MAXREPEAT else high
            return f"(?:{self.sequence(inner, first=False, last=False)}){{{low},{most}}}"
        what = _NAMES.get(kind, str(kind).lower())
        raise InexactError(f"the pattern {self.pattern!r} has {what}, which no grammar can follow")

    def _anchor(self, value: Any, begins: bool, ends: bool) -> str:
        if value is code.AT_BEGINNING and begins:
            return "^"
        if value is code.AT_END and ends:
            # Python's `$` also matches before a final line end.
            return r"\n?$" if self.wide else "$"
        if value in (code.AT_BEGINNING, code.AT_END):
            raise InexactError(f"the pattern {self.pattern!r} has an anchor inside")
        raise InexactError(
            f"the pattern {self.pattern!r} has a word boundary, which no grammar can follow"
        )


def _is_anchor(item: Any) -> bool:
    return bool(item[0] is code.AT)


_NAMES = {
    code.ASSERT: "a look-around",
    code.ASSERT_NOT: "a look-around",
    code.GROUPREF: "a back reference",
    code.GROUPREF_EXISTS: "a back reference",
    code.SUBPATTERN: "flags inside",
}


def _class(items: Any, *, wide: bool) -> str:
    negated = items[0][0] is code.NEGATE
    items = items[1:] if negated else items
    named = {value for kind, value in items if kind is code.CATEGORY}
    if any(pair <= named for pair in _COMPLEMENTS):
        return _NOTHING if negated else "(?s:.)"
    found = []
    for kind, value in items:
        if kind is code.LITERAL:
            found.append(_literal(value))
        elif kind is code.RANGE:
            found.append(f"{_literal(value[0])}-{_literal(value[1])}")
        else:
            found.append(_CLASSES[value][negated is not wide])
    has_nul, *has_escaped = (_has(items, point) is not negated for point in (_NUL, *_ESCAPED))
    if wide or not has_nul or all(has_escaped):
        return f"[{'^' if negated else ''}{''.join(found)}]"
    nul = _literal(_NUL)
    return f"[^{''.join(found)}{nul}]" if negated else f"[{''.join(found)}&&[^{nul}]]"


def _has(items: Any, point: int) -> bool:
    """Return True if the items of a class name NUL, a quote or a backslash."""
    for kind, value in items:
        if kind is code.LITERAL:
            has = value == point
        elif kind is code.RANGE:
            has = value[0] <= point <= value[1]
        else:
            has = value in _NEGATIVE_CATEGORIES
        if has:
            return True
    return False
