"""Patterns for llguidance: they match what ECMA-262 and Python's `re` both match."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.grammars import Grammar, choice_grammar, regex_grammar
from server.structured_outputs.patterns import PatternError, prefix_of, translated, without
from tests.server.structured_outputs.walks import accepts, empty_mask, grammar_of, vocabulary

TEXTS = ("", "a", "ab", "b1", "_", "é", "é1", "1", "-", "\n", "\r", " ", "[", "&", "x-y", "\u2028")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "pattern",
    [
        *(r"^\w+$", r"^[^\w]$", r"^\W$", r"^[\W]$", r"^\d", r"^\D*$", r"^[^\d\s]+$", r"^\s$"),
        *("^.$", "^[[]$", "^[+--]$", "^[&&a]$", r"^[\-x]-", "^a|b", "^(?<n>a)(?:b)?$", r"^a{1,2}$"),
        *(r"^\u0061", r"^[\x00-\x1f]$", r"\/|\.|\_", "^x{a}|}$", "^(?:)$", "^[^-]$", "a*?b"),
    ],
)
def test_a_match_is_one_for_python(pattern: str) -> None:
    grammar = grammar_of({"type": "string", "pattern": pattern})
    plain = re.compile(pattern.replace("(?<n>", "(?P<n>"))
    found = [accepts(grammar, json.dumps(text, ensure_ascii=False)) for text in TEXTS]
    ours = [text for text, fits in zip(TEXTS, found, strict=True) if fits]
    theirs = [text for text in TEXTS if plain.search(text)]
    assert set(ours) <= set(theirs)
    # They differ where ECMA-262 and Python do.
    assert all(re.search(r"[é\r\n\u2028]", text) for text in set(theirs) - set(ours))


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=a)", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        ("(?i)a", "flags"),
        (r"(a)\1", "back reference"),
        (r"a\b", "word boundary"),
        (r"\Aa", "escape"),
        ("[]a]", "read differently"),
        ("[^a[:alpha:]]", "read differently"),
        ("[a", "no end"),
        (r"[a-\d]", "range"),
        (r"\ud800", "surrogate"),
        ("a**", "no regular expression"),
        ("a{,3}", "no regular expression"),
    ],
)
def test_what_has_no_translation_is_named(pattern: str, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        translated(pattern)


DECIMALS = (
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,1}0*$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,0}0*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,1}|(?=[\d.]{1,3}0*$)\d{0,1}\.\d{0,1}0*$)",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,5}0*$)",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,2}|(?=[\d.]{1,3}0*$)\d*\.\d*0*$)",
)
"""pydantic's patterns of `Decimal`, without and with limits of digits and places."""


@pytest.mark.parametrize("pattern", DECIMALS)
def test_decimals_of_pydantic_are_exact(pattern: str) -> None:
    # With both limits, pydantic's first case has no end, by which any text may follow.
    meant = re.compile(re.sub(r"\(\?:(\\d\{0,\d\})\|", r"(?:\1$|", pattern))
    ours = re.compile(translated(pattern))
    texts = ("".join(some) for n in range(6) for some in itertools.product("-.01", repeat=n))
    assert [text for text in texts if bool(meant.search(text)) != bool(ours.search(text))] == []


def test_other_texts_are_all_but_some() -> None:
    pattern = re.compile(without(["", "a", "ab", "c-"], ["x-"]))
    texts = ["".join(some) for n in range(4) for some in itertools.product("abc-x", repeat=n)]
    left = [text for text in texts if not pattern.search(text)]
    assert left == [t for t in texts if t in ("", "a", "ab", "c-") or t.startswith("x-")]


def test_only_a_plain_beginning_is_a_prefix() -> None:
    found = [prefix_of(pattern) for pattern in ("^x-", r"^a\.", "^", "x-", "^x-$", "^[a]", "^a+")]
    assert found == ["x-", "a.", "", None, None, None, None]


WHOLE = (*TEXTS, "84", "A84Z", "\t", "/", "\\", '"', '{"pattern": "a"}', "a\nb", "\U0001f600", "}")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "regex",
    [
        *(r"\A[0-9]{2}\Z", "^[0-9]{2}$", "^a|b1$", "[a-z\n]", "[\t-\r]", r"[\n\r\t]"),
        *(r"a\nb", "\n", "a.b", "[^a]", r"[\s\S]", r"\/|/", '"', r"\"|\\", r"\U0001F600", r"\S"),
        *("", "()", "a*", "a*?", "(|a)", "a|", "[a-]|}|&"),
        *(r"\{\"pattern\": \"a\"\}", r'\{"pattern": "\w"\}'),
    ],
)
def test_a_regex_describes_the_whole_text_as_in_python(regex: str) -> None:
    grammar = regex_grammar(regex).text
    ours = [text for text in WHOLE if accepts(grammar, text)]
    assert ours == [text for text in WHOLE if re.fullmatch(regex, text)]


def test_no_line_end_is_any_character() -> None:
    grammar = regex_grammar(".").text
    assert [c for c in "a\n\r\u2028\u2029é\t" if accepts(grammar, c)] == ["a", "é", "\t"]


@pytest.mark.parametrize("kind", "AZGKhHRXNVQECyaelpuU178kbB")
def test_an_unknown_escape_of_a_regex_is_named_with_its_place(kind: str) -> None:
    with pytest.raises(UnusableError, match=rf"'\\{kind}' at character 3\b"):
        regex_grammar(rf"ab\{kind}c")


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        (r"a\A", r"the anchor '\\A' at character 2"),
        (r"a\012", r"'\\0' at character 2"),
        (r"\uD83D\uDE00", r"'\\uD83D' at character 1 is half of a surrogate pair"),
        (r"[\ud800-\udfff]", "surrogate"),
        (r"\u{d83d}", "surrogate"),
        (r"\u{110000}", "no character"),
        ("a^b", r"the anchor '\^' at character 2"),
        ("(a$)", r"the anchor '\$' at character 3"),
    ],
)
def test_what_a_regex_cannot_have_is_named(regex: str, words: str) -> None:
    with pytest.raises(UnusableError, match=words):
        regex_grammar(regex)


@pytest.mark.parametrize("grammar", [regex_grammar("banana"), choice_grammar(["banana"])])
def test_a_text_may_have_any_spelling(grammar: Grammar) -> None:
    compiler, tokenizer, texts = vocabulary()
    mask = empty_mask()
    compiler.compile(grammar.text, {tokenizer.eos_token_id}, in_trial=True).fill_bitmask(mask, 0)
    bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
    spellings = {text for text in texts if text and "banana".startswith(text)}
    assert {texts[token] for token in np.flatnonzero(bits)} == spellings >= {"b", "ba"}
