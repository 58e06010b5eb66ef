"""Regular languages as terminals of llguidance's dialect: sets of the JSON spellings of texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.structured_outputs.rewriting.document import InexactError
from server.structured_outputs.rewriting.scalars.characters import ANY, NOTHING

MAX_EXPRESSION = 20_000
"""Most characters of a terminal."""


@dataclass(frozen=True, slots=True)
class Language:
    """A set of texts: a regular expression, or a combination of some in the dialect.

    Raises `InexactError` above `MAX_EXPRESSION`.
    """

    text: str
    is_regex: bool = True

    def __post_init__(self) -> None:
        if len(self.text) > MAX_EXPRESSION:
            raise InexactError(
                f"the lengths, patterns and formats of a string take {len(self.text)} characters "
                f"as one expression; the limit is {MAX_EXPRESSION}"
            )

    @property
    def has_any_characters(self) -> bool:
        """True if the language bounds the length of its texts at most."""
        rest = self.text.removeprefix(f"(?:{ANY})").removeprefix(ANY)
        return self.is_regex and rest != self.text and not rest.strip("*{},0123456789")

    @property
    def expression(self) -> str:
        """The language as a part of a terminal."""
        if not self.text:
            return '""'
        return f"/{self.text}/" if self.is_regex else f"({self.text})"

    def then(self, other: Language) -> Language:
        """Return the texts of this language, each followed by one of the other."""
        if EMPTY in (self, other):
            return other if self == EMPTY else self
        if NONE in (self, other):
            return NONE
        if self.is_regex and other.is_regex:
            return Language(f"{_group(self.text)}{_group(other.text)}")
        return Language(f"{self.expression} {other.expression}", is_regex=False)

    def or_(self, *others: Language) -> Language:
        """Return the texts of any of the languages."""
        found = [item for item in dict.fromkeys((self, *others)) if item != NONE]
        if ALL in found or len(found) < 2:
            return ALL if ALL in found else found[0] if found else NONE
        if all(item.is_regex for item in found):
            return Language("|".join(_group(item.text) for item in found))
        return Language(" | ".join(item.expression for item in found), is_regex=False)

    def and_(self, *others: Language) -> Language:
        """Return the texts of all of the languages."""
        found = [item for item in dict.fromkeys((self, *others)) if item != ALL]
        if NONE in found or len(found) < 2:
            return NONE if NONE in found else found[0] if found else ALL
        return Language(" & ".join(item.expression for item in found), is_regex=False)

    def without(self, other: Language) -> Language:
        """Return the texts that are not of the other language."""
        if other == NONE or self == NONE:
            return self
        if other == ALL:
            return NONE
        return Language(f"{self.expression} & ~{other.expression}", is_regex=False)

    def repeated(self, low: int, high: int | None) -> Language:
        """Return `low` to `high` texts of this language in sequence."""
        counts = f"{{{low},{'' if high is None else high}}}"
        if self.is_regex:
            return Language(f"(?:{self.text}){counts}")
        return Language(f"{self.expression}{counts}", is_regex=False)


def either(languages: Iterable[Language]) -> Language:
    """Return the texts of any of the languages; none for no language."""
    return NONE.or_(*languages)


def _group(regex: str) -> str:
    return f"(?:{regex})" if "|" in regex else regex


EMPTY = Language("")
"""The empty text alone."""
NONE = Language(NOTHING)
"""No text."""
ALL = Language(f"{ANY}*")
"""All texts."""
