"""Normalised schemas: equal to the original, by jsonschema, over instances and random walks."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema.validators import Draft202012Validator, validator_for

from server.structured_outputs.constraint import Constraint, ConstraintKind, UnusableError
from server.structured_outputs.grammars import Grammar, SchemaRules, choice_grammar, regex_grammar
from server.structured_outputs.normaliser import normalised
from server.structured_outputs.patterns import PatternError, get_prefix, translated, without
from server.structured_outputs.trial import do_job, job_bytes
from tests.schema_corpus import BAD, GOOD, InstanceGenerator, SchemaGenerator
from tests.server.structured_outputs.walks import (
    accepts,
    documents,
    empty_mask,
    faults,
    for_python,
    grammar_of,
    try_grammar,
    vocabulary,
)


def verdict(schema: Any, *, exact: bool = True, closed: bool = True) -> str | None:
    job = job_bytes([Constraint(ConstraintKind.JSON, json.dumps(schema), "json", exact)])
    return do_job(job, try_grammar, SchemaRules(compact=False, closed=closed)).reason


@pytest.mark.parametrize("schema", GOOD, ids=json.dumps)
def test_a_good_schema_is_followed(schema: dict[str, Any]) -> None:
    assert verdict(schema) is None
    for closed in (True, False):
        for text in documents(grammar_of(schema, closed=closed), 6):
            assert faults(schema, text) == []


UNREADABLE: tuple[tuple[Any, str], ...] = (
    ({"const": "\ud800"}, "surrogate pair"),
    ({"properties": {"\udfff": {}}}, "surrogate pair"),
    ({"type": "number", "minimum": float("inf")}, "beyond what a double holds"),
)
"""Refused; clients do not send them."""


@pytest.mark.parametrize(("schema", "words"), (*BAD, *UNREADABLE), ids=lambda x: str(x)[:60])
def test_a_bad_schema_is_refused(schema: dict[str, Any], words: str) -> None:
    assert words in (verdict(schema) or "")


_AB = {"properties": {"a": {"const": 1}, "b": {"const": 2}}}
_REQUIRED = [{"required": ["a"]}, {"required": ["b", "c"]}]
OPEN: tuple[tuple[Any, tuple[str, ...], tuple[str, ...]], ...] = (
    # oneOf: branches that exclude each other, and branches that do not.
    ({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]},
     ('"a"', '"abcd"'), ('"ab"', '"abc"')),
    ({"type": "object", "oneOf": _REQUIRED},
     ('{"a": 1}', '{"b": 1, "c": 1}', '{"a": 1, "b": 1}'), ("{}", '{"a": 1, "b": 1, "c": 1}')),
    ({"type": "object", "oneOf": [{**_AB, "required": ["a"]}, {"properties": {"a": False}}]},
     ('{"a": 1}', "{}", '{"b": 3}'), ('{"a": 2}',)),
    ({"oneOf": [{"$ref": "#/$defs/n"}, {"type": "null"}],
      "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}}},
     ("null", '{"n": null}', '{"n": {"n": null}}'), ("{}", '{"n": 1}')),
    ({"type": ["string", "integer"], "oneOf": [{"minLength": 3}, {"maxLength": 1}]},
     ('"abc"', '"a"'), ("5", '"ab"')),
    ({"oneOf": [True, {"type": "number"}, False]}, ('"a"', "[]", "{}"), ("1", "1.5")),
    # not
    ({"type": "string", "not": {"enum": ["no", "n"]}}, ('""', '"nope"', '"é"'), ('"no"', '"n"')),
    ({"type": "number", "not": {"enum": [0, 2]}}, ("1", "-0.5", "3.5"), ("0", "0.0", "2")),
    ({"type": "integer", "not": {"enum": [0, 1, 3]}}, ("-1", "2", "4"), ("0", "1", "3")),
    ({"enum": [True, False, None, "a"], "not": {"const": True}}, ("false", "null"), ("true",)),
    ({"type": "object", "not": {"required": ["a", "b"]}}, ("{}", '{"a": 1}', '{"b": 1}'),
     ('{"a": 1, "b": 1}',)),
    ({"type": "object", "not": {"properties": {"a": {"type": "string"}}}},
     ('{"a": 1}',), ("{}", '{"a": "x"}')),
    ({"not": {"not": {"type": "null"}}}, ("null",), ("1",)),
    ({"not": {"anyOf": [{"type": ["object", "array"]}, {"type": "string", "minLength": 2}]}},
     ('"a"', "2", "true"), ('"ab"', "[]")),
    # if
    ({"type": "object", "properties": {"c": {"enum": ["US", "CA"]}, "z": {"type": "string"}},
      "required": ["c", "z"], "if": {"properties": {"c": {"const": "US"}}},
      "then": {"properties": {"z": {"pattern": "^[0-9]{5}$"}}},
      "else": {"properties": {"z": {"maxLength": 3}}}},
     ('{"c": "US", "z": "12345"}', '{"c": "CA", "z": "K1A"}'),
     ('{"c": "US", "z": "K1A"}', '{"c": "CA", "z": "12345"}')),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, ('"ab"', "1"), ('"a"',)),
    # dependencies
    ({"type": "object", **_AB, "dependentRequired": {"a": ["b"]}},
     ("{}", '{"b": 2}', '{"a": 1, "b": 2}'), ('{"a": 1}',)),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
      "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
     ("{}", '{"c": 1}', '{"b": 1, "c": 1}'), ('{"a": 1}', '{"b": 1}')),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, ('{"b": 1}',),
     ('{"a": 1}',)),
    # names of properties
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ('{"a": 1, "b": []}', "{}"),
     ('{"c": 1}',)),
    ({"type": "object", **_AB, "propertyNames": {"pattern": "^[b-d]$"}}, ('{"b": 2, "c": 1}',),
     ('{"a": 1}', '{"e": 1}')),
    ({"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"maxLength": 1}}},
     ('{"a": 1}', "{}"), ('{"ab": 1}',)),
    ({"type": "object", "patternProperties": {"^s_": {"type": "string"}, "^i_": {"const": 1}},
      "properties": {"id": {"const": 0}}}, ('{"id": 0, "i_a": 1, "s_b": "x"}', '{"o": 1}'),
     ('{"i_a": "x"}', '{"s_": 1}')),
    ({"type": "object", **_AB, "additionalProperties": {"const": 3}}, ('{"a": 1, "c": 3}',),
     ('{"a": 3}', '{"c": 1}')),
    # A listed name in another spelling is the same name.
    ({"type": "object", "properties": {"a": {"const": 1}, "b/": {"const": 2}}},
     ('{"a": 1, "b/": 2, "c": 3}',), ('{"\\u0061": 3}', '{"b\\/": 3}', '{"a": 1, "a": 3}')),
    ({"type": "object", "not": {"required": ["a"]}}, ('{"b": 1}',), ('{"\\u0061": 1}',)),
    # numbers of properties; repeated names are one
    ({"type": "object", "minProperties": 1}, ('{"a": 1}',), ("{}",)),
    ({"type": "object", **_AB, "minProperties": 1}, ('{"a": 1}', '{"b": 2}', '{"c": 0}'), ("{}",)),
    ({"type": "object", **_AB, "additionalProperties": False, "maxProperties": 2},
     ('{"a": 1, "b": 2}', "{}"), ('{"c": 1}',)),
    ({"type": "object", "required": ["a"], "properties": {"a": {}, "b": {}}, "maxProperties": 1},
     ('{"a": 1}',), ('{"a": 1, "b": 1}', '{"a": 1, "c": 1}')),
    # unevaluated
    ({"type": "object", "allOf": [_AB], "unevaluatedProperties": False}, ('{"a": 1, "b": 2}',),
     ('{"c": 1}',)),
    ({"prefixItems": [{"const": 1}], "unevaluatedItems": False}, ("[1]", "[]"), ("[1, 2]", "[2]")),
    # references
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, ("4",),
     ("1", '"a"')),
    ({"$id": "http://x.y/z", "items": {"$ref": "other#b"},
      "$defs": {"o": {"$id": "other", "$defs": {"c": {"$anchor": "b", "const": 1}}}}},
     ("[1]",), ("[2]",)),
    # drafts
    ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": 1}],
      "additionalItems": False}, ("[1]", "[]"), ("[2]", "[1, 1]")),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
      "exclusiveMinimum": True}, ("4",), ("3",)),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a",
      "minimum": 3, "definitions": {"a": {"type": "integer"}}}, ("1",), ("1.5",)),
    # What llguidance reads too widely.
    ({"type": "number", "exclusiveMinimum": 100, "maximum": 100.5}, ("100.1", "100.5"), ("100",)),
    ({"type": ["number", "null"]}, ("-0.25", "null", "123456789012345"), ("1e999", "1E9")),
    ({"type": "number", "minimum": 0, "maximum": 1, "not": {"enum": [0, 0.5]}}, ("0.1", "1"),
     ("0", "0.5")),
    ({"type": "string", "pattern": '^[^"]$'}, ('"a"', '"\\n"'), ('"\\""', '""')),
    ({"type": "string", "pattern": "^[\\x00-!]$"}, ('" "',), ('"\\""', '"\\\\"')),
    ({"type": "string", "not": {"enum": ['"', "b"]}}, ('"a"', '"\\\\"'), ('"\\""', '"b"')),
    ({"type": "string", "format": "source-category"}, ('"a"',), ("1",)),
    ({"type": "string", "format": "date", "minLength": 3}, ('"2024-02-29"',), ('"2023-13-01"',)),
)  # fmt: skip
CLOSED: tuple[tuple[Any, tuple[str, ...], tuple[str, ...]], ...] = (
    ({"type": "object", **_AB}, ('{"a": 1}', "{}"), ('{"c": 1}',)),
    (_AB, ('{"a": 1, "b": 2}',), ("1", '{"c": 1}')),
    ({"type": ["object", "null"], **_AB}, ("null", "{}"), ("1",)),
    ({"type": "object"}, ('{"c": 1}',), ("1",)),
    ({"type": "object", **_AB, "additionalProperties": True}, ('{"c": 1}',), ('{"a": 2}',)),
    ({"type": "object", **_AB, "required": ["c"]}, ('{"a": 1, "c": 0}',), ("{}",)),
    ({"allOf": [_AB, {"properties": {"c": {}}}]}, ('{"a": 1, "c": 0}',), ('{"d": 1}',)),
    ({"type": "object", **_AB, "anyOf": [{"properties": {"c": {}}}, {"required": ["d"]}]},
     ('{"a": 1, "c": 1}', '{"a": 1, "d": 1}'), ('{"c": 1, "d": 1}', '{"e": 1}')),
    ({"anyOf": [{"type": "object", **_AB}, {"type": "object", "properties": {"c": {}}}]},
     ('{"a": 1}', '{"c": 1}'), ('{"a": 1, "c": 1}',)),
    ({"$ref": "#/$defs/a", "required": ["c"], "$defs": {"a": {"properties": {"c": _AB}}}},
     ('{"c": {"a": 1}}',), ('{"c": {"d": 1}}', '{"c": {}, "d": 1}')),
    ({"type": "object", **_AB, "maxProperties": 2}, ('{"a": 1, "b": 2}',), ('{"c": 1}',)),
    ({"type": "object", "patternProperties": {"^x": {"const": 1}}}, ('{"xa": 1}',), ('{"a": 1}',)),
)  # fmt: skip


@pytest.mark.parametrize(("schema", "yes", "no"), OPEN, ids=lambda x: str(x)[:60])
def test_what_a_schema_allows(schema: Any, yes: tuple[str, ...], no: tuple[str, ...]) -> None:
    assert verdict(schema, closed=False) is None
    grammar = grammar_of(schema, closed=False)
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []
    assert [text for text in yes if faults(schema, text)] == []


@pytest.mark.parametrize(("schema", "yes", "no"), CLOSED, ids=lambda x: str(x)[:60])
def test_what_a_closed_schema_allows(
    schema: Any, yes: tuple[str, ...], no: tuple[str, ...]
) -> None:
    grammar = grammar_of(schema, closed=True)
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


def test_a_refusal_names_its_place_and_keyword() -> None:
    schema = {"properties": {"a/b": {"items": [{"uniqueItems": True}]}}}
    assert verdict(schema) == (
        "#/properties/a~1b/items/0: 'uniqueItems' cannot be followed; leave it out"
    )
    dependent = {"dependencies": {"a": {"contains": {}}}}
    assert (verdict(dependent) or "").startswith("#/dependencies/a: 'contains'")
    assert verdict(schema, exact=False) is None


def test_white_space_is_bounded() -> None:
    grammar = grammar_of({"type": "array", "items": {"type": "object"}})
    assert accepts(grammar, '[{"a": 1, "b":2},{}]')
    for text in ("[ ]", "[{},  {}]", '[{"a" :1}]', '[{"a":  1}]', "[\n{}]", "[{}] "):
        assert not accepts(grammar, text)
    rules = SchemaRules(compact=True, closed=True)
    job = job_bytes([Constraint(ConstraintKind.JSON, '{"type": "array"}', "json")])
    compact = do_job(job, try_grammar, rules).grammar
    assert compact is not None
    assert accepts(compact, "[1,2]") and not accepts(compact, "[1, 2]")


def test_work_is_bounded() -> None:
    many = [{"required": [f"a{i}", f"b{i}"]} for i in range(400)]
    with pytest.raises(UnusableError, match="too many combinations"):
        normalised({"type": "object", "oneOf": many}, closed=True)
    with pytest.raises(UnusableError, match="too deeply"):
        chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(3000)}
        normalised({"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {}}}, closed=True)


def check(seeds: range) -> None:
    """Compare generated schemas, normalised, with the originals over instances and walks."""
    wrong = list[Any]()
    compared = walked = 0
    for seed in seeds:
        made = SchemaGenerator(seed)
        for schema in (made.plain(), made.wild(), made.combined(), made.overlapping()):
            for closed in (False, True):
                try:
                    found = normalised(schema, closed=closed)
                except UnusableError:
                    continue
                if found.left_out or verdict(schema, closed=closed) is not None:
                    continue
                texts = documents(grammar_of(schema, closed=closed), 3, seed, must_end=False)
                wrong += [(schema, closed, t) for t in texts if faults(schema, t)]
                walked += len(texts)
                judge = validator_for(schema, Draft202012Validator)(for_python(schema))
                ours = Draft202012Validator(for_python(found.schema))
                # Python's expressions have no classes by category.
                near = [] if "\\\\p{" in json.dumps(found.schema) else texts
                for text in InstanceGenerator(schema, seed).near(near, 12 if near else 0):
                    value = json.loads(text)
                    fits, given = ours.is_valid(value), judge.is_valid(value)
                    # `5.0` is no integer in draft 4; grammars write `5`.
                    if fits and not given and not text.endswith(".0"):
                        wrong.append((schema, closed, text, "accepted"))
                    narrower = closed or "patternProp" in str(schema) or "format" in str(schema)
                    if given and not fits and not narrower:
                        wrong.append((schema, closed, text, "refused"))
                    compared += 1
    assert wrong == []
    assert compared > 100 * len(seeds) // 3
    assert walked > 10 * len(seeds) // 3


def test_normalised_schemas_are_equal() -> None:
    check(range(30))


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_normalised_schemas_are_equal_widely() -> None:
    check(range(1000, 1600))


# ----------------------------------------------------------------------------------------- patterns
TEXTS = ("", "a", "ab", "b1", "_", "é", "é1", "1", "-", "\n", "\r", " ", "[", "&", "x-y", "\u2028")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "pattern",
    [
        r"^\w+$",
        r"^[^\w]$",
        r"^\W$",
        r"^[\W]$",
        r"^\d",
        r"^\D*$",
        r"^[^\d\s]+$",
        r"^\s$",
        "^.$",
        "^[[]$",
        "^[+--]$",
        "^[&&a]$",
        r"^[\-x]-",
        "^a|b",
        "^(?<n>a)(?:b)?$",
        r"^a{1,2}$",
        r"^\u0061",
        r"^[\x00-\x1f]$",
        r"\/|\.|\_",
        "^x{a}|}$",
        "^(?:)$",
        "^[^-]$",
        "a*?b",
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
    found = [get_prefix(pattern) for pattern in ("^x-", r"^a\.", "^", "x-", "^x-$", "^[a]", "^a+")]
    assert found == ["x-", "a.", "", None, None, None, None]


WHOLE = (*TEXTS, "84", "A84Z", "\t", "/", "\\", '"', '{"pattern": "a"}', "a\nb", "\U0001f600", "}")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "regex",
    [
        r"\A[0-9]{2}\Z",
        "^[0-9]{2}$",
        "^a|b1$",
        "[a-z\n]",
        "[\t-\r]",
        r"[\n\r\t]",
        r"a\nb",
        "\n",
        "a.b",
        "[^a]",
        r"[\s\S]",
        r"\/|/",
        '"',
        r"\"|\\",
        r"\U0001F600",
        r"\S",
        "",
        "()",
        "a*",
        "a*?",
        "(|a)",
        "a|",
        "[a-]|}|&",
        r"\{\"pattern\": \"a\"\}",
        r'\{"pattern": "\w"\}',
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


# ------------------------------------------------------------------------------------- real schemas
LINES = (Path(__file__).parent / "schemas.jsonl").read_text().splitlines()
SCHEMAS = {line["name"]: line["schema"] for line in map(json.loads, LINES)}
REFUSED = {
    **dict.fromkeys(
        ("ical_recurrence", "package_json_keywords", "pydantic_user", "tsconfig"), "'uniqueItems'"
    ),
    "dynamic_reference": "'$dynamicRef'",
    "game_character": "'minProperties'",
    "iot_telemetry": "'contains'",
    "password_rules": "look-ahead",
    "remote_reference": "leads to another document",
}
"""A word of the reason; each is in the table of docs/structured_outputs.md."""
WALKS = 4


def test_there_are_forty_and_most_are_followed() -> None:
    assert len(SCHEMAS) >= 40
    assert REFUSED.keys() <= SCHEMAS.keys()
    assert len(REFUSED) <= 10


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_document_obeys_or_the_schema_is_refused(name: str) -> None:
    reason = verdict(SCHEMAS[name])
    if name in REFUSED:
        assert reason is not None
        assert REFUSED[name] in reason
        return
    assert reason is None
    assert wrong_documents(name, WALKS) == []


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - REFUSED.keys()))
def test_every_document_obeys_widely(name: str) -> None:
    assert wrong_documents(name, 100) == []


def wrong_documents(name: str, count: int) -> list[Any]:
    """Return the documents of a grammar that its schema refuses, with the faults."""
    schema = SCHEMAS[name]
    texts = documents(grammar_of(schema), count)
    texts += documents(grammar_of(schema, closed=False), count, must_end=False)
    assert len(set(texts)) > 1
    return [(text, found) for text in texts if (found := faults(schema, text))]
