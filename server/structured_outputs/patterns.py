"""Regular expressions of requests and JSON schemas (ECMA-262) in llguidance's syntax, Rust's.

A translated expression matches what ECMA-262 and Python's `re` both match, so that a validator of
either kind accepts the string.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

ANY_TEXT = "^(?s:.)*$"
_LEAP_YEAR = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    f"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+\-]{_HOUR})"
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats of which llguidance takes more than RFC 3339: leap seconds at any time, 30 February."""

# What both readings match, and what one of them does, without brackets.
_NARROW = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
}
_WIDE = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": r"\s\x1c-\x1f\ufeff"}
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\x0c", "v": r"\x0b", "0": r"\x00"}
_HEX = "[0-9A-Fa-f]"
_CODE = re.compile(rf"x({_HEX}{{2}})|u({_HEX}{{4}})|c([A-Za-z])")
_LONG_CODE = re.compile(rf"u\{{({_HEX}{{1,6}})\}}|U({_HEX}{{8}})")
"""Code points, which ECMA-262 and Python write differently; not in schemas."""
_CATEGORY = re.compile(r"[pP]\{(?:[LMNPSZC][a-z]?)\}")
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>)")
_ANCHOR = re.compile(r"(\^|\\A)|\$|\\[Zz]")
"""An anchor; those of the beginning are a group."""
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ ")
_REFUSED = {
    **dict.fromkeys("1k", ", a back reference or an octal number,"),
    **dict.fromkeys("bB", ", a word boundary,"),
}
_NAMES = {
    **dict.fromkeys(("(?=", "(?!"), "a look-ahead"),
    **dict.fromkeys(("(?<=", "(?<!"), "a look-behind"),
}
_DECIMAL = "^(?!^[-+.]*$)[+-]?0*"
_BOTH_LIMITS = re.compile(
    r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\{0,\1\}\\\.\\d\{0,(\d+)\}0\*\$\)"
)
_DIGITS_LIMIT = re.compile(
    r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\*\\\.\\d\*0\*\$\)"
)
_PLACES_LIMIT = re.compile(r"\\d\*\\\.\?\\d\{0,(\d+)\}0\*\$")
_MOST_DIGITS = 100
_PREFIX = re.compile(r"\^((?:[^\\^$.|?*+()\[\]{}]|\\[!-/:-@\[-`{-~])*)")
_SPECIAL = frozenset("\\^$.|?*+()[]{}-&~#")
_NUL, _SECOND = r"\x00", r"\x01"
_NULS = (_NUL, r"\u0000", "\0")
"""NUL in a class: llguidance 1.7.6 and 1.9.1 add a quote and a backslash to a class that has it."""
_NOTHING = r"[^\s\S]"
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_SEVERAL = re.compile(r"\\[dDwWsSpP]")
_END, _ALL = "end", "all"
"""Marks of a text and of a prefix in a tree of characters; a character is shorter."""


class PatternError(ValueError):
    """A pattern has no translation; the message names the part."""


def translated(pattern: str) -> str:
    """Return the expression of a schema's pattern. Raises `PatternError`."""
    if pattern.startswith(_DECIMAL) and (found := _decimal(pattern[len(_DECIMAL) :])) is not None:
        return f"^[+-]?(?:{found})$"
    return _Translation(pattern).text()


def whole_text(regex: str) -> str:
    """Return the expression of a regex that describes a whole text. Raises `PatternError`."""
    return _Translation(regex, whole=True).text()


def _decimal(rest: str) -> str | None:
    """Return the expression of pydantic's `Decimal` after its sign; None if it is another one."""
    if rest == r"\d*\.?\d*$":
        return r"[0-9]+\.?[0-9]*|\.[0-9]+"
    if found := _PLACES_LIMIT.fullmatch(rest):
        places = int(found[1])
        return rf"[0-9]+\.?[0-9]{{0,{places}}}0*|\.{_fraction(places)}"
    if found := _BOTH_LIMITS.fullmatch(rest):
        whole, together, places = map(int, found.groups())
        # The look-ahead bounds the digits with the point.
        if whole + places >= together:
            if whole:
                return None
            places = together - 1
        first = rf"(?:0+[0-9]{{0,{whole}}}|[0-9]{{1,{whole}}})" if whole else "0+"
        return rf"{first}(?:\.[0-9]{{0,{places}}}0*)?|\.{_fraction(places)}"
    found = _DIGITS_LIMIT.fullmatch(rest)
    if found and int(found[1]) + 1 == int(found[2]) <= _MOST_DIGITS:
        most = int(found[1])
        options = [rf"0*[0-9]{{{k}}}\.[0-9]{{0,{most - k}}}0*" for k in range(1, most + 1)]
        others = [rf"0+[0-9]{{0,{most}}}", rf"[0-9]{{1,{most}}}", rf"0+\.[0-9]{{0,{most}}}0*"]
        return "|".join([*others, *options, rf"\.{_fraction(most)}"])
    return None


def _fraction(places: int) -> str:
    """Return the expression of at least one digit, of which `places` may be others than zero."""
    return rf"(?:[0-9]{{1,{places}}}0*|0+)" if places else "0+"


class _Translation:
    """`whole`: it is a regex of a whole text, whose anchors mean nothing at its ends."""

    def __init__(self, pattern: str, *, whole: bool = False) -> None:
        self._pattern, self._whole = pattern, whole
        self._at = 0
        self._out: list[str] = []

    def text(self) -> str:
        while self._at < len(self._pattern):
            self._piece()
        return "".join(self._out)

    def _piece(self) -> None:
        char = self._pattern[self._at]
        if char == "(":
            self._group()
        elif char == "[":
            self._out.append(self._class())
            self._quantifier()
        elif self._whole and (found := _ANCHOR.match(self._pattern, self._at)):
            if self._at != 0 if found[1] else found.end() != len(self._pattern):
                raise PatternError(f"the anchor '{found[0]}'{self._place()} is not at an end")
            self._at = found.end()
        elif char == "\\":
            self._out.append(self._escape(bracketed=False, wide=False))
            self._quantifier()
        elif char in "|^$":
            self._at += 1
            self._out.append(char)
        elif char == ")":
            self._at += 1
            self._out.append(char)
            self._quantifier()
        elif char in "*+?" or (char == "{" and re.match(r"\{[\d,]", self._pattern[self._at :])):
            raise PatternError(f"it is no regular expression at {self._pattern[self._at :][:20]!r}")
        else:
            self._at += 1
            self._out.append(r"[^\n\r\u2028\u2029]" if char == "." else _literal(char))
            self._quantifier()

    def _place(self) -> str:
        return f" at character {self._at + 1}"

    def _group(self) -> None:
        rest = self._pattern[self._at :]
        if found := _GROUP.match(rest):
            self._at += found.end()
        elif rest.startswith("(?"):
            name = next((name for start, name in _NAMES.items() if rest.startswith(start)), "flags")
            raise PatternError(f"{name} cannot be followed")
        else:
            self._at += 1
        self._out.append("(?:")

    def _quantifier(self) -> None:
        """Copy a quantifier with its mark of the shortest match."""
        found = _QUANTIFIER.match(self._pattern, self._at)
        if found is None:
            return
        self._at = found.end()
        self._out.append(found[0])
        if self._pattern.startswith("?", self._at):
            self._at += 1
            self._out.append("?")

    def _class(self) -> str:
        pattern = self._pattern
        self._at += 1
        negated = pattern.startswith("^", self._at)
        self._at += negated
        if pattern.startswith("]", self._at):
            raise PatternError("a class begins with ']', which is read differently")
        items = list[str]()
        while not pattern.startswith("]", self._at):
            start = self._at
            if named := _POSIX.match(pattern, start):
                raise PatternError(f"'{named[0]}' in a class is read differently")
            first = self._member(wide=negated)
            if pattern.startswith("-", self._at) and not pattern.startswith("-]", self._at):
                self._at += 1
                if _SEVERAL.match(pattern, start) or _SEVERAL.match(pattern, self._at):
                    raise PatternError("a range in a class has an end of several characters")
                last = self._member(wide=negated)
                first = f"{_without_nul(first) or _SECOND}-{last}"
            items.append(_without_nul(first))
        self._at += 1
        if negated:
            return f"[^{_NUL}{''.join(items)}]"
        return f"[{''.join(items)}]" if any(items) else _NOTHING

    def _member(self, *, wide: bool) -> str:
        if self._at >= len(self._pattern):
            raise PatternError("a class has no end")
        char = self._pattern[self._at]
        if char == "\\":
            return self._escape(bracketed=True, wide=wide)
        self._at += 1
        return _literal(char)

    def _escape(self, *, bracketed: bool, wide: bool) -> str:
        rest = self._pattern[self._at + 1 :]
        kind = rest[:1]
        place = self._place()
        self._at += 2
        if kind.lower() in _NARROW and kind:
            return _kind(kind, bracketed=bracketed, wide=wide)
        if kind == "b" and bracketed:
            return r"\x08"
        if kind in _CONTROLS and not (kind == "0" and rest[1:2].isdigit()):
            return _CONTROLS[kind]
        if found := _CODE.match(rest) or (self._whole and _LONG_CODE.match(rest)):
            self._at += found.end() - 1
            code = ord(rest[1]) % 32 if kind == "c" else int(found[found.lastindex or 0], 16)
            if code in range(0xD800, 0xE000) or code > sys.maxunicode:
                raise PatternError(
                    f"the escape '\\{found[0]}'{place} is half of a surrogate pair or no character"
                )
            return f"\\u{code:04x}" if code <= 0xFFFF else f"\\u{{{code:x}}}"
        if (found := _CATEGORY.match(rest)) is not None:
            self._at += found.end() - 1
            return f"\\{found[0]}"
        if kind and kind in _PUNCTUATION:
            return _literal(kind)
        what = _REFUSED.get("1" if kind.isdigit() else kind, "")
        raise PatternError(f"the escape '\\{kind}'{place}{what} cannot be followed")


def _kind(kind: str, *, bracketed: bool, wide: bool) -> str:
    name, excludes = kind.lower(), kind.isupper()
    if not bracketed:
        # Of what is excluded, the wider reading counts.
        return f"[^{_WIDE[name]}]" if excludes else f"[{_NARROW[name]}]"
    if excludes:
        return f"[^{(_NARROW if wide else _WIDE)[name]}]"
    return (_WIDE if wide else _NARROW)[name]


def _without_nul(member: str) -> str:
    """Return a member of a class; nothing for NUL."""
    return "" if member in _NULS else member


def _literal(char: str) -> str:
    return f"\\{char}" if char in _SPECIAL else char


def without(texts: Iterable[str], prefixes: Iterable[str] = ()) -> str:
    """Return the expression of all texts but these, and but those with one of the prefixes."""
    root: dict[str, Any] = {}
    for text, end in (*((text, _END) for text in texts), *((text, _ALL) for text in prefixes)):
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[end] = {}
    return f"^{_rest(root)}$"


def _rest(node: dict[str, Any]) -> str:
    if _ALL in node:
        return _NOTHING
    following = {char: below for char, below in node.items() if char != _END}
    options = [] if _END in node else [""]
    others = "".join(map(_literal, following))
    others += _NUL if '"' in following or "\\" in following else ""
    options.append(f"{f'[^{others}]' if others else '(?s:.)'}(?s:.)*")
    options += [_literal(char) + _rest(below) for char, below in following.items()]
    return f"(?:{'|'.join(options)})"


def get_prefix(pattern: str) -> str | None:
    """Return the text with which a pattern's matches begin, if it says nothing else."""
    found = _PREFIX.fullmatch(pattern)
    return None if found is None else re.sub(r"\\(.)", r"\1", found[1])
