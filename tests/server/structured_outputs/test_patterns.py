"""Patterns as regular languages, judged by Python's `re` over all short texts."""

from __future__ import annotations

import itertools
import json
import re

import llguidance
import pytest

from server.structured_outputs.rewriting.scalars.languages import Language
from server.structured_outputs.rewriting.scalars.patterns import matching
from server.structured_outputs.rewriting.scalars.texts import in_quotes

PATTERNS = (
    *("^abc$", "b", "a$b", "^a|b$", "(^|,)a($|,)", "(^$)|(^ab$)", "a*^b", "(a|^)b", "^a{2,}$"),
    *("(?=a)b", "(?=.*a)(?=.*b)", r"^(?=.*\d)(?=.*[a-z]).{2,4}$", "^(?!ab).*$", "^(?!.*b).+$"),
    *("^(?!.*(ab|,)).*$", "^(a(?=b)b|c)$", "(?:a(?!b)){1,3}$", "^a(?!$)", "(?<=a)b", "(?<!a)b"),
    *("x?(?<!a)b", "^(?:(?!ab).)*$", "^((?!a).)*$", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"),
    *(r"\bab\b", r"^\bab\b", r"a\b", r"\Bb", r"\s*\bab", "^[^a]$", r"^\w+$", r"^\d{2}$"),
    *(r'^"\\$', r"^[\s\S]*$", r"^[^\n]+$", "^.$", r"^[\x00-\x1f]$", r"^[^\w ]$", r"[^\D2]"),
)
TEXTS = (
    *("".join(text) for n in range(5) for text in itertools.product("ab,1 ", repeat=n)),
    *('"\\', "\n", "a\n", "\t", "é", "٣", "ab\n", "\x7f", "c", "ac", "\x00", "ab,ab"),
    *("\r", "b\x00", "22", "-", "+0.5", "\u2028x"),
)


def of_language(language: Language) -> set[str]:
    grammar = f"%llguidance {{}}\nstart: TEXT\nTEXT: {in_quotes(language)}\n"
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return {text for text in TEXTS if _takes(matcher, text)}


def _takes(matcher: llguidance.LLMatcher, text: str) -> bool:
    spelled = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode()
    matcher.reset()
    if matcher.validate_tokens(list(spelled)) < len(spelled):
        return False
    return matcher.consume_tokens(list(spelled)) and matcher.is_accepting()


def by_python(pattern: str) -> set[str]:
    return {text for text in TEXTS if re.search(pattern, text)}


def by_ecma(pattern: str) -> set[str]:
    """Return the texts that match by ECMA-262: ASCII classes, `$` at the end alone."""
    return {text for text in TEXTS if re.search(pattern.replace("$", r"\Z"), text, re.ASCII)}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_language_has_the_texts_of_both_readings(pattern: str) -> None:
    both, one = by_python(pattern) & by_ecma(pattern), by_python(pattern) | by_ecma(pattern)
    found = of_language(matching(pattern))
    assert found - both == set()
    # Only line ends and letters beyond ASCII may be left out.
    assert {text for text in both - found if text.isascii() and not {*text} & {*"\r\n"}} == set()
    assert one - of_language(matching(pattern, wide=True)) == set()
