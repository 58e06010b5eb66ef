"""Translation of patterns from ECMA-262, as in JSON Schema, to regular languages.

ECMA-262 and Python's `re`, which most validators use, differ about some classes (`\\d`, `\\w`,
`\\s`) and ends (`$`, `.`). A language has the texts that match by both, or a wide one by either.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from server.structured_outputs.rewriting.document import InexactError
from server.structured_outputs.rewriting.scalars.characters import (
    ANY,
    EITHER_LINE_END,
    NO_WORD,
    WORD,
    all_but,
    class_of,
    spelled,
)
from server.structured_outputs.rewriting.scalars.languages import (
    ALL,
    EMPTY,
    NONE,
    Language,
    either,
)

_MAX_UNROLLED = 8
"""Most repetitions of a part with a look-around, which are written out."""
_MAX_CASES = 64
_MAX_POINTS = 2000
"""Most characters of a class before a word boundary, which are looked at one by one."""
_REPEATS = (code.MAX_REPEAT, code.MIN_REPEAT)
_LOOKS = (code.ASSERT, code.ASSERT_NOT)
_AHEAD = 1
_NEWLINE = Language(spelled("\n"))


@functools.lru_cache(1024)
def matching(pattern: str, *, wide: bool = False) -> Language:
    """Return the texts in which the pattern matches anywhere.

    A `wide` language has every text that matches by Python's `re` or ECMA-262. Raises
    `InexactError` for an invalid pattern, and for parts that no automaton can follow.
    """
    tree = _parsed(pattern)
    if tree.state.flags & ~re.UNICODE:
        raise InexactError(f"the pattern {pattern!r} has flags; spell both cases out")
    return _Translation(pattern, wide).anywhere(list(tree))


@functools.lru_cache(64)
def whole(pattern: str, *, wide: bool = False) -> Language:
    """Return the texts that a pattern without look-arounds and anchors matches from end to end."""
    return Language(_Translation(pattern, wide).regex(list(_parsed(pattern))))


def _parsed(pattern: str) -> Any:
    try:
        return parser.parse(re.sub(r"\(\?<(?![=!])", "(?P<", pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise InexactError(f"the pattern {pattern!r} is no regular expression: {error}") from None


@dataclass(frozen=True, slots=True)
class _Translation:
    """Translates one pattern; items are those of Python's parser.

    With `dots`, `.` matches line ends too.
    """

    pattern: str
    wide: bool
    dots: bool = False

    def anywhere(self, items: list[Any]) -> Language:
        """Return the texts in which the items match at some place."""
        return either(self._placed(case) for case in self._cases(items))

    def _cases(self, items: list[Any]) -> list[list[Any]]:
        """Return alternatives of the items without groups before anchors at their start."""
        waiting, found = [items], []
        while waiting:
            case = waiting.pop()
            opened = self._opened(case)
            if opened is None:
                found.append(case)
            else:
                waiting += opened
            if len(waiting) + len(found) > _MAX_CASES:
                self._refuse(f"more than {_MAX_CASES} alternatives with an anchor")
        return found

    def _opened(self, items: list[Any]) -> list[list[Any]] | None:
        """Return the items with the first group opened that has something looking back."""
        for index, (kind, value) in enumerate(items):
            before, after = items[:index], items[index + 1 :]
            if not _looks_back([(kind, value)]):
                if _least(items[: index + 1]) > 0:
                    return None
                continue
            if kind is code.SUBPATTERN and not value[1] and not value[2]:
                return [[*before, *value[3], *after]]
            if kind is code.BRANCH:
                return [[*before, *branch, *after] for branch in value[1]]
            if kind in _REPEATS and value[1] == 1:
                once = [[*before, *value[2], *after]]
                return once if value[0] else [*once, [*before, *after]]
            return None
        return None

    def _placed(self, items: list[Any]) -> Language:
        """Return the texts in which the items match, by what may be before them."""
        before = ALL
        for index, (kind, value) in enumerate(items):
            if kind is code.AT and value is code.AT_BEGINNING:
                before = before.and_(EMPTY)
            elif kind is code.AT and value in (code.AT_BOUNDARY, code.AT_NON_BOUNDARY):
                return self._at_boundary(before, items[index + 1 :], value is code.AT_BOUNDARY)
            elif kind in _LOOKS and value[0] != _AHEAD:
                before = self._after_look(before, kind, value[1])
            elif not _is_skipped(items, index, anywhere=before == ALL):
                rest = _at_start(items[index:]) if before == EMPTY else items[index:]
                return before.then(self._from(rest, ALL))
        return before.then(ALL)

    def _after_look(self, before: Language, kind: Any, inner: Any) -> Language:
        if kind is code.ASSERT:
            return before.and_(ALL.then(self._from(list(inner), EMPTY)))
        flipped = replace(self, wide=not self.wide)
        return before.without(ALL.then(flipped._from(list(inner), EMPTY)))

    def _at_boundary(self, before: Language, rest: list[Any], is_boundary: bool) -> Language:
        """Return the texts with a word boundary, or none, between `before` and the rest."""
        after = self._from(rest, ALL)
        word, other = (self._class(name) for name in (WORD, NO_WORD))
        ends = {True: before.and_(ALL.then(word)),
                False: before.and_(EMPTY.or_(ALL.then(other)))}  # fmt: skip
        starts = {True: after.and_(word.then(ALL)),
                  False: after.and_(EMPTY.or_(other.then(ALL)))}  # fmt: skip
        pairs = [(one, one is not is_boundary) for one in (True, False)]
        return either(ends[one].then(starts[other_]) for one, other_ in pairs)

    def _class(self, category: Any) -> Language:
        return Language(class_of([(code.CATEGORY, category)], wide=self.wide))

    def _from(self, items: list[Any], rest: Language) -> Language:
        """Return the texts of the items followed by the rest of the text."""
        index = len(items)
        while index:
            end = index
            while index and not _asserts([items[index - 1]]):
                index -= 1
            rest = Language(self.regex(items[index:end])).then(rest)
            if index:
                index -= 1
                rest = self._asserting(items[index], items[:index], rest)
        return rest

    def _asserting(self, item: Any, before: list[Any], rest: Language) -> Language:
        kind, value = item
        if kind is code.AT:
            return self._anchored(value, before, rest)
        if kind in _LOOKS:
            return self._looking(kind, value, rest)
        if kind is code.SUBPATTERN and not value[1] and not value[2]:
            return self._from(list(value[3]), rest)
        if kind is code.BRANCH:
            return either(self._from(list(branch), rest) for branch in value[1])
        if kind in _REPEATS:
            return self._repeated(value, rest)
        return self._refuse(_NAMES.get(kind, str(kind).lower()))

    def _looking(self, kind: Any, value: Any, rest: Language) -> Language:
        direction, inner = value
        if direction != _AHEAD:
            return self._refuse("a look-behind after other characters")
        if kind is code.ASSERT:
            return rest.and_(self._from(list(inner), ALL))
        flipped = replace(self, wide=not self.wide)
        return rest.without(flipped._from(list(inner), ALL))

    def _anchored(self, value: Any, before: list[Any], rest: Language) -> Language:
        if value is code.AT_END:
            # Python's `$` also matches before a final line end.
            return rest.and_(EMPTY.or_(_NEWLINE) if self.wide else EMPTY)
        if value in (code.AT_BOUNDARY, code.AT_NON_BOUNDARY):
            return self._boundary_after(before, rest, value is code.AT_BOUNDARY)
        if value is code.AT_BEGINNING and _least(before) > 0:
            return NONE
        return self._refuse("an anchor inside")

    def _boundary_after(self, before: list[Any], rest: Language, is_boundary: bool) -> Language:
        """Return the rest behind a word boundary, or none, after one known character."""
        last = _last(before)
        kinds = [_is_word(last, wide) for wide in (False, True)] if last is not None else [None]
        if None in kinds or len(set(kinds)) > 1:
            return self._refuse("a word boundary after a part that may end in different ways")
        word, other = (self._class(name) for name in (WORD, NO_WORD))
        if kinds[0] is is_boundary:
            return rest.and_(EMPTY.or_(other.then(ALL)))
        return rest.and_(word.then(ALL))

    def _repeated(self, value: Any, rest: Language) -> Language:
        low, high, inner = value
        items = list(inner)
        if high is code.MAXREPEAT and low == 0 and (tempered := self._tempered(items, rest)):
            return tempered
        if high is code.MAXREPEAT or high > _MAX_UNROLLED:
            return self._refuse("a look-around or anchor inside of a repetition")
        for count in range(high, 0, -1):
            more = self._from(items, rest)
            rest = more if count <= low else rest.or_(more)
        return rest

    def _tempered(self, items: list[Any], rest: Language) -> Language | None:
        """Return `(?:(?!no)one)*` up to the end of the text; None for anything else."""
        if len(items) == 1 and items[0][0] is code.SUBPATTERN:
            items = list(items[0][1][3])
        if len(items) != 2 or items[0][0] is not code.ASSERT_NOT or items[0][1][0] != _AHEAD:
            return None
        unwanted_items = list(items[0][1][1])
        if rest not in (EMPTY, EMPTY.or_(_NEWLINE)) or _asserts(items[1:]):
            return None
        if not _least(unwanted_items):
            return None
        flipped = replace(self, wide=not self.wide)
        unwanted = ALL.then(flipped._from(unwanted_items, ALL))
        return Language(f"(?:{self.regex(items[1:])})*").without(unwanted).then(rest)

    def regex(self, items: list[Any]) -> str:
        """Return a regular expression of items that assert nothing."""
        return "".join(self._item(kind, value) for kind, value in items)

    def _item(self, kind: Any, value: Any) -> str:
        if kind is code.LITERAL:
            return spelled(chr(value))
        if kind is code.NOT_LITERAL:
            return all_but([value])
        if kind is code.ANY:
            return (
                ANY if self.dots else all_but(EITHER_LINE_END[:1] if self.wide else EITHER_LINE_END)
            )
        if kind is code.IN:
            return class_of(value, wide=self.wide)
        return self._group(kind, value)

    def _group(self, kind: Any, value: Any) -> str:
        if kind is code.BRANCH:
            return f"(?:{'|'.join(self.regex(list(item)) for item in value[1])})"
        if kind is code.SUBPATTERN:
            _, added, removed, inner = value
            if added == re.DOTALL and not removed:
                return f"(?:{replace(self, dots=True).regex(list(inner))})"
            if not added and not removed:
                return f"(?:{self.regex(list(inner))})"
        if kind in _REPEATS:
            low, high, inner = value
            most = "" if high is code.MAXREPEAT else high
            return f"(?:{self.regex(list(inner))}){{{low},{most}}}"
        return self._refuse(_NAMES.get(kind, str(kind).lower())).text

    def _refuse(self, what: str) -> Language:
        raise InexactError(f"the pattern {self.pattern!r} has {what}, which no grammar can follow")


def _at_start(items: list[Any]) -> list[Any]:
    """Return items at the start of the text without the anchors of their first look-aheads."""
    found = list(items)
    for index, (kind, value) in enumerate(items):
        if kind in _LOOKS and value[0] == _AHEAD:
            found[index] = (kind, (value[0], _without_start(list(value[1]))))
        else:
            break
    return found


def _without_start(items: list[Any]) -> list[Any]:
    while items and tuple(items[0]) == (code.AT, code.AT_BEGINNING):
        items = items[1:]
    if not items:
        return []
    kind, value = items[0]
    if kind is code.SUBPATTERN:
        value = (*value[:3], _without_start(list(value[3])))
    elif kind is code.BRANCH:
        value = (value[0], [_without_start(list(branch)) for branch in value[1]])
    return [(kind, value), *items[1:]]


def _parts(kind: Any, value: Any) -> list[Any]:
    """Return the sequences of items inside an item."""
    if kind is code.SUBPATTERN:
        return [value[3]]
    if kind is code.BRANCH:
        return list(value[1])
    if kind in _REPEATS:
        return [value[2]]
    return []


def _asserts(items: Any) -> bool:
    """Return True if items have an anchor, a look-around or a word boundary."""
    return any(
        kind is code.AT or kind in _LOOKS or any(_asserts(part) for part in _parts(kind, value))
        for kind, value in items
    )


def _looks_back(items: Any) -> bool:
    """Return True if items depend on the text before them."""
    for kind, value in items:
        if kind is code.AT and value is not code.AT_END:
            return True
        if kind in _LOOKS and value[0] != _AHEAD:
            return True
        if any(_looks_back(part) for part in _parts(kind, value)):
            return True
    return False


def _least(items: Any) -> int:
    """Return the least number of characters that items match."""
    total = 0
    for kind, value in items:
        if kind in (code.LITERAL, code.NOT_LITERAL, code.ANY, code.IN):
            total += 1
        elif kind is code.BRANCH:
            total += min(map(_least, value[1]))
        elif kind in _REPEATS:
            total += value[0] * _least(value[2])
        elif kind is code.SUBPATTERN:
            total += _least(value[3])
    return total


def _is_skipped(items: list[Any], index: int, *, anywhere: bool) -> bool:
    """Return True if what an optional item matches makes no difference.

    Anything may be before it (`anywhere`), or the next item is an anchor, which holds only where
    the optional one is empty.
    """
    if _least([items[index]]) or _asserts([items[index]]):
        return False
    rest = items[index + 1 :]
    if anywhere:
        return _looks_back(rest)
    return bool(rest) and tuple(rest[0]) == (code.AT, code.AT_BEGINNING)


def _last(items: list[Any]) -> Any:
    """Return the item of the last character, or None if it is not one item."""
    if not items:
        return None
    kind, value = items[-1]
    if kind is code.SUBPATTERN:
        return _last(list(value[3]))
    if kind in _REPEATS and value[0] > 0:
        return _last(list(value[2]))
    return items[-1] if kind in (code.LITERAL, code.IN) else None


def _is_word(item: Any, wide: bool) -> bool | None:
    """Return whether all characters of an item are of words, None if only some are."""
    kind, value = item
    flags = re.UNICODE if wide else re.ASCII
    if kind is code.LITERAL:
        return bool(re.match(r"\w", chr(value), flags))
    names = {part for one, part in value if one is code.CATEGORY}
    if value[0][0] is code.NEGATE or not names <= {code.CATEGORY_WORD, code.CATEGORY_DIGIT}:
        return None
    ranges = [
        range(part[0], part[1] + 1) if one is code.RANGE else range(part, part + 1)
        for one, part in value
        if one is not code.CATEGORY
    ]
    if sum(map(len, ranges)) > _MAX_POINTS:
        return None
    found = {bool(re.match(r"\w", chr(p), flags)) for points in ranges for p in points}
    found |= {True for _ in names}
    return found.pop() if len(found) == 1 else None


_NAMES = {
    code.GROUPREF: "a back reference",
    code.GROUPREF_EXISTS: "a back reference",
    code.SUBPATTERN: "flags inside",
}
