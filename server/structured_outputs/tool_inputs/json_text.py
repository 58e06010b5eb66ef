"""Regular expressions of the text that JSON strings have for the texts of an expression.

JSON escapes characters one by one, so that an expression is translated atom by atom. The syntax is
that of Rust's `regex`, which llguidance reads. A translated expression has one spelling for each
text: the short escape where JSON has one. Control characters without a short escape are matched as
single characters only, not as members of a class.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.scalars.characters import escaped, literal

_ESCAPED = dict(zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True))
"""Characters with a short escape in JSON, and the letter of it."""
_PLAIN = r'[^"\\\x00-\x1f]'
"""Class of the characters that JSON does not escape."""
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": lambda _: False,
    "w": lambda _: False,
    "s": lambda c: c in "\t\n\v\f\r",
}
"""Which of the escaped characters are in a class of the syntax."""
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|[xuU]\{([0-9A-Fa-f]+)\}|u([0-9A-Fa-f]{4})")
_CATEGORY = re.compile(r"([pP])(?:\{([A-Z][a-z]?)\}|([A-Z]))")
_GROUP = re.compile(r"\(\?(?:P?<[A-Za-z_]\w*>|([a-zA-Z]*)(-[a-zA-Z]*)?([:)]))")
_QUANTIFIER = re.compile(r"\{\d*,?\d*\}")
_PASSED = "|)*+?"
_ANCHORS = "^$"
_REFUSED_FLAGS = "xmR"


@dataclass(frozen=True, slots=True)
class _Atom:
    """One character, or a class of the syntax such as `\\d`.

    `has` returns whether it has a character that JSON escapes.
    """

    source: str
    has: Callable[[str], bool]
    point: int | None = None


def json_regex(pattern: str, *, dot_all: bool = False) -> str:
    """Return the expression of the JSON text of what `pattern` matches as a whole.

    Raises `UnusableError` for parts that have no translation.
    """
    return "".join(_Translator(pattern, dot_all).parts())


def class_regex(first: str, last: str) -> str:
    """Return the expression of one character between two, both included."""
    return f"[{literal(ord(first))}-{literal(ord(last))}]"


class _Translator:
    """Reads one expression from its first character to its last."""

    def __init__(self, pattern: str, dot_all: bool) -> None:
        self._pattern = pattern
        self._at = 0
        self._dot_all = [dot_all]

    def parts(self) -> Iterator[str]:
        """Yield the translated atoms, groups and operators."""
        while self._at < len(self._pattern):
            yield self._next()
        if len(self._dot_all) > 1:
            raise UnusableError(f"a group of the pattern {self._pattern[:80]!r} has no end")

    def _next(self) -> str:
        character = self._pattern[self._at]
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character == "{" and (found := _QUANTIFIER.match(self._pattern, self._at)):
            self._at = found.end()
            return found[0]
        if character == ")":
            self._close()
        if character in _PASSED:
            self._at += 1
            return character
        if character in _ANCHORS:
            raise UnusableError(self._where("an anchor inside of a pattern is not supported"))
        if character == ".":
            self._at += 1
            return _one_of(_PLAIN, [c for c in _ESCAPED if self._dot_all[-1] or c != "\n"])
        atom = self._atom()
        if atom.point is not None:
            return _character(atom.point)
        return _one_of(f"[{atom.source}&&{_PLAIN}]", [c for c in _ESCAPED if atom.has(c)])

    def _group(self) -> str:
        if not self._pattern.startswith("(?", self._at):
            self._at += 1
            self._dot_all.append(self._dot_all[-1])
            return "("
        found = _GROUP.match(self._pattern, self._at)
        if found is None or any(flag in _REFUSED_FLAGS for flag in found[1] or ""):
            raise UnusableError(self._where("a group of this kind is not supported"))
        self._at = found.end()
        dot_all = "s" not in (found[2] or "") and ("s" in (found[1] or "") or self._dot_all[-1])
        if found[3] == ")":
            self._dot_all[-1] = dot_all
        else:
            self._dot_all.append(dot_all)
        return found[0]

    def _close(self) -> None:
        if len(self._dot_all) == 1:
            raise UnusableError(self._where("no group begins before this parenthesis"))
        self._dot_all.pop()

    def _class(self) -> str:
        begin = self._at
        self._at += 1
        negated = self._take("^")
        atoms: list[_Atom] = []
        while not self._take("]") or not atoms:
            if self._at >= len(self._pattern):
                raise UnusableError(f"the class at character {begin + 1} of a pattern has no end")
            atoms.append(self._member(first=not atoms))
        source = "".join(atom.source for atom in atoms)
        whole = f"[^{source}]" if negated else f"[{source}]"
        escaped = [c for c in _ESCAPED if negated != any(atom.has(c) for atom in atoms)]
        return _one_of(f"[{whole}&&{_PLAIN}]", escaped)

    def _member(self, *, first: bool) -> _Atom:
        if first and self._pattern[self._at - 1] == "]":
            # The first bracket of a class is one of its characters.
            return _one(ord("]"))
        if self._pattern[self._at] == "[" or self._pattern[self._at : self._at + 2] in (
            *("&&", "--", "~~"),
        ):
            raise UnusableError(self._where("classes within classes are not supported"))
        low = self._atom()
        ranged = self._pattern.startswith("-", self._at)
        if low.point is None or not ranged or self._pattern.startswith("-]", self._at):
            return low
        self._at += 1
        high = self._atom()
        if high.point is None or high.point < low.point:
            raise UnusableError(self._where("the range of characters before it is invalid"))
        bounds = range(low.point, high.point + 1)
        return _Atom(f"{low.source}-{high.source}", lambda c: ord(c) in bounds)

    def _atom(self) -> _Atom:
        """Read a character or an escape."""
        character = self._pattern[self._at : self._at + 1]
        self._at += 1
        if character != "\\":
            return _one(ord(character)) if character else _fail("a pattern ends in a class")
        letter = self._pattern[self._at : self._at + 1]
        if (found := _CODE.match(self._pattern, self._at)) is not None:
            self._at = found.end()
            return _one(int(found[1] or found[2] or found[3], 16))
        if (found := _CATEGORY.match(self._pattern, self._at)) is not None:
            self._at = found.end()
            return _category(found[2] or found[3], negated=found[1] == "P")
        self._at += 1
        if letter in _NAMED:
            return _one(ord(_NAMED[letter]))
        if letter and letter.lower() in _CLASSES:
            has = _CLASSES[letter.lower()]
            return _Atom(f"\\{letter}", has if letter.islower() else lambda c: not has(c))
        if not letter or letter.isalnum():
            raise UnusableError(self._where(f"'\\{letter}' is not supported"))
        return _one(ord(letter))

    def _take(self, character: str) -> bool:
        found = self._pattern.startswith(character, self._at)
        self._at += found
        return found

    def _where(self, problem: str) -> str:
        return f"{problem}, at character {self._at + 1} of the pattern {self._pattern[:80]!r}"


def _one(point: int) -> _Atom:
    if point > 0x10FFFF or 0xD800 <= point < 0xE000:
        return _fail(f"a pattern has the code {point:x}, which is no character")
    return _Atom(literal(point), lambda c: ord(c) == point, point)


def _fail(problem: str) -> _Atom:
    raise UnusableError(problem)


def _category(name: str, *, negated: bool) -> _Atom:
    return _Atom(
        f"\\{'P' if negated else 'p'}{{{name}}}",
        lambda c: negated != unicodedata.category(c).startswith(name),
    )


def _one_of(plain: str, escaped: list[str]) -> str:
    """Return the expression of one of the `plain` characters or of the escaped ones."""
    if not escaped:
        return plain
    letters = "".join(literal(ord(_ESCAPED[character])) for character in escaped)
    return rf"(?:{plain}|(?-i:\\[{letters}]))"


def _character(point: int) -> str:
    text = json.dumps(chr(point), ensure_ascii=False)[1:-1]
    # Letters of an escape have one case.
    return literal(point) if len(text) == 1 else f"(?-i:{escaped(text)})"
