"""Strings: combinations of lengths, patterns, formats and excluded texts."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import llguidance

from server.structured_outputs.rewriting.choices import Plain
from server.structured_outputs.rewriting.document import (
    NOT_FORMATS,
    NOT_ONE_OF,
    NOT_PATTERNS,
    InexactError,
    SchemaDocument,
)
from server.structured_outputs.rewriting.scalars.characters import ANY, spelled
from server.structured_outputs.rewriting.scalars.formats import (
    FORMAT_LENGTHS,
    FORMATS,
    WIDE_FORMATS,
)
from server.structured_outputs.rewriting.scalars.languages import ALL, Language
from server.structured_outputs.rewriting.scalars.patterns import matching, whole
from server.structured_outputs.schema_walk import Schema

_EXPRESSED = frozenset(("pattern", "format", NOT_PATTERNS, NOT_FORMATS))
"""Keywords of strings whose languages may exclude each other."""
_FUEL = 500_000
"""Most steps of the lexer to decide whether a language is empty."""
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=_FUEL, step_lexer_fuel=_FUEL, verbose_errors=False
)


def text_language(document: SchemaDocument, plain: Plain) -> Language | None:
    """Return the strings that satisfy all schemas, or None if there are none."""
    shortest = max((int(schema.get("minLength", 0)) for schema in plain), default=0)
    longest = min(map(int, _longest(document, plain)), default=None)
    if longest is not None and shortest > longest:
        return None
    found = of_lengths(shortest, longest)
    parts = 0
    for schema in plain:
        try:
            for allowed, language in _parts(schema, wide=document.wide):
                found = found.and_(language) if allowed else found.without(language)
                parts += 1
        except InexactError as error:
            document.leave_out(schema, error)
    if parts == 0 or (parts == 1 and found.is_regex):
        return found
    if longest is None and all(_EXPRESSED.isdisjoint(schema) for schema in plain):
        # Finitely many texts are excluded, so that some are left.
        return found
    try:
        return None if _is_empty(found) else found
    except InexactError as error:
        document.leave_out(plain[0], error)
        return of_lengths(shortest, longest)


def of_lengths(shortest: int, longest: int | None) -> Language:
    """Return the texts of `shortest` to `longest` characters; None is no limit."""
    if shortest == 0 and longest is None:
        return ALL
    return Language(ANY).repeated(shortest, longest)


def in_quotes(language: Language) -> str:
    """Return the terminal of the strings whose texts are of a language."""
    if language.is_regex:
        return f'/"(?:{language.text})"/'
    return f'/"/ {language.expression} /"/'


def _longest(document: SchemaDocument, plain: Plain) -> Iterator[int]:
    for schema in plain:
        if "maxLength" in schema:
            yield schema["maxLength"]
        if not document.wide and schema.get("format") in FORMAT_LENGTHS:
            yield FORMAT_LENGTHS[schema["format"]]


def _parts(schema: Schema, *, wide: bool) -> Iterator[tuple[bool, Language]]:
    """Yield languages that strings are of, with True, or not of, with False."""
    if "pattern" in schema:
        yield True, matching(schema["pattern"], wide=wide)
    if (name := schema.get("format")) in FORMATS and (not wide or name in WIDE_FORMATS):
        yield True, _of_format(name, wide=wide)
    for pattern in schema.get(NOT_PATTERNS, ()):
        yield False, matching(pattern, wide=not wide)
    for name in schema.get(NOT_FORMATS, ()):
        yield False, _of_format(name, wide=not wide)
    if words := [value for value in schema.get(NOT_ONE_OF, ()) if isinstance(value, str)]:
        yield False, Language("|".join(map(spelled, words)))


def _of_format(name: str, *, wide: bool) -> Language:
    return whole((WIDE_FORMATS if wide else FORMATS)[name], wide=wide)


@functools.lru_cache(4096)
def _is_empty(language: Language) -> bool:
    """Return True if the language has no text.

    Raises `InexactError` if llguidance cannot decide it within its limits.
    """
    grammar = f"%llguidance {{}}\nstart: TEXT\nTEXT: {in_quotes(language)}\n"
    matcher = llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=_LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return False
    problem = str(matcher.get_error())
    if problem.startswith("NoExtension"):
        return True
    raise InexactError(
        "the lengths, patterns and formats of a string are too complex together; leave one out"
    )


@functools.cache
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")
