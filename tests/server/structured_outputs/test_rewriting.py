"""The rewriting of schemas, judged by jsonschema over random walks; what it leaves out."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from typing import Any

import pytest

from server.settings import ServerSettings
from server.structured_outputs.constraint import (
    Constraint,
    ConstraintKind,
    SchemaLimits,
    Undeclared,
    UnusableError,
)
from server.structured_outputs.inspection import inspect
from server.structured_outputs.rewriting.rewriting import rewrite
from server.structured_outputs.trial_job import do_job, job_bytes
from tests.schema_corpus import BAD, GOOD
from tests.schema_generator import SchemaGenerator
from tests.schema_instances import InstanceGenerator
from tests.server.structured_outputs.walks import accepts, documents, faults

LIMITS = SchemaLimits.of(ServerSettings())


def verdict(schema: Any, *, exact: bool = True) -> str | None:
    job = job_bytes([Constraint(ConstraintKind.JSON, json.dumps(schema), "json", exact)], LIMITS)
    return do_job(job, lambda _kind, _text: [], compact=False).reason


@pytest.mark.parametrize("schema", GOOD, ids=json.dumps)
def test_a_good_schema_is_followed(schema: dict[str, Any]) -> None:
    assert verdict(schema) is None
    for text in documents(rewrite(schema, compact=False).grammar, 6):
        assert faults(schema, text) == []


UNREADABLE: tuple[tuple[Any, str], ...] = (
    ({"const": "\ud800"}, "surrogate pair"),
    ({"properties": {"\udfff": {}}}, "surrogate pair"),
    ({"type": "number", "minimum": float("inf")}, "beyond what a double holds"),
)
"""Refused; clients do not send them."""
REFUSED = (*BAD, *UNREADABLE)


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_bad_schema_is_refused_in_our_words(schema: dict[str, Any], words: str) -> None:
    reason = verdict(schema)
    assert reason is not None
    assert words in reason


YES_AND_NO: tuple[tuple[Any, tuple[str, ...], tuple[str, ...]], ...] = (
    # What the schema allows is allowed: the rewriting loses nothing that is not documented.
    ({"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True},
     ("[]", "[3, 1, 2]", "[2]"), ("[1, 1]", "[4]")),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}},
     ("[5]", "[1, 5]", "[5, 5, 7]"), ("[]", "[1, 2]")),
    ({"type": "array", "items": {"enum": [1, 5]}, "contains": {"const": 5}, "minContains": 2,
      "maxContains": 3, "maxItems": 4}, ("[5, 5]", "[1, 5, 1, 5]"), ("[5]", "[5, 5, 5, 5]")),
    ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2,
      "maxProperties": 2}, ('{"a": 1, "c": []}', '{"b": "x", "c": null}'),
     ("{}", '{"c": 1}', '{"a": 1, "b": 1, "c": 1}')),
    ({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}},
      "dependentRequired": {"a": ["b"]}}, ("{}", '{"b": 2}', '{"a": 1, "b": 2}'), ('{"a": 1}',)),
    ({"type": "object", "properties": {"c": {"enum": ["US", "CA"]}, "z": {"type": "string"}},
      "required": ["c", "z"], "if": {"properties": {"c": {"const": "US"}}},
      "then": {"properties": {"z": {"pattern": "^[0-9]{5}$"}}},
      "else": {"properties": {"z": {"maxLength": 3}}}},
     ('{"c": "US", "z": "12345"}', '{"c": "CA", "z": "K1A"}'),
     ('{"c": "US", "z": "K1A"}', '{"c": "CA", "z": "12345"}')),
    ({"type": "string", "not": {"enum": ["no", "n"]}}, ('""', '"nope"', '"yes"', '"é"'),
     ('"no"', '"n"')),
    ({"type": "number", "not": {"const": 0}}, ("1", "-0.5", "0.000000001"), ("0", "0.0", "-0")),
    ({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]},
     ('"a"', '"abcd"'), ('"ab"', '"abc"')),
    ({"type": "object", "patternProperties": {"^s_": {"type": "string"}, "^i_": {"const": 1}},
      "properties": {"id": {"const": 0}}}, ('{"id": 0, "i_a": 1, "s_b": "x"}',),
     ('{"i_a": "x"}', '{"other": 1}')),
    ({"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
     ('{"a": 1, "b": 2}', '{"é": 2}'), ('{"a": 2}', '{"b": 1}')),
    ({"type": "string", "pattern": "b"}, ('"abc"', '"b"'), ('"a"',)),
    ({"type": "string", "format": "date"}, ('"2024-02-29"', '"1999-12-31"'),
     ('"2023-02-29"', '"2024-13-01"')),
    ({"type": "string", "maxLength": 2}, ('"\\n😀"',), ('"\n"', '"abc"')),
    ({"type": "number", "minimum": 0.25, "exclusiveMaximum": 1}, ("0.25", "0.999"), ("1", "0.2")),
    ({"type": "integer", "multipleOf": 5}, ("-15", "0", "20"), ("7", "5.0")),
    ({"type": ["object", "null"], "required": ["a"]}, ("null", '{"a": [1]}'), ("{}", "[]")),
    ({"type": "array", "prefixItems": [{"const": 1}], "maxItems": 0}, ("[]",), ("[1]",)),
    ({"prefixItems": [{"const": 1}, {"const": 2}]}, ("[]", "[1]", "[1, 2]"), ("[2]", "[1, 2, 3]")),
    # Branches that exclude each other only as far as their types go.
    ({"type": ["string", "integer"], "oneOf": [{"minLength": 3}, {"maxLength": 1}]},
     ('"abc"', '"a"'), ("5", '"ab"')),
    ({"minimum": 5, "oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]},
                              {"properties": {"a": {"const": 2}}, "required": ["a"]}]},
     ('{"a": 1}', '{"a": 2}'), ("7", '{"a": 3}')),
    ({"oneOf": [{"required": ["a"], "properties": {"a": {}}}, {"type": "string", "maxLength": 3}]},
     ('{"a": 1}', "5"), ("{}", '"a"')),
    ({"oneOf": [True, {"type": "number"}, False]}, ('"a"', "[]", "{}"), ("1", "1.5")),
    ({"oneOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
     ('"1.2.3.4"', '"::1"'), ('"1"',)),
    # Nothing inside of 'not' evaluates a property.
    ({"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False,
      "not": {"not": {"properties": {"b": {"const": 2}}}}}, ('{"a": 1}', "{}"), ('{"b": 2}',)),
    ({"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False,
      "not": {"oneOf": [{"properties": {"b": True}}, {"properties": {"c": True}}]}},
     ('{"a": 1}', "{}"), ('{"b": 2}', '{"c": 2}')),
    # Values are judged by the draft that they were written for.
    ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": 1}],
      "enum": [[1], [2]]}, ("[1]",), ("[2]",)),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
      "exclusiveMinimum": True, "enum": [3, 4, 5.0]}, ("4",), ("3", "5.0")),
    # A name that only Python's '\\w' matches has to satisfy both readings.
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"minimum": 2},
      "patternProperties": {"^\\w$": {"maximum": 2}}, "required": ["é"]},
     ('{"a": 1, "é": 2}', '{"é": 2}'),
     ('{"é": 1}', '{"é": 3}', '{"a": 3, "é": 2}')),
    ({"type": "object", "properties": {"\x7f": {"const": "\x7f"}}, "required": ["\x7f"]},
     ('{"\\u007f": "\\u007f"}',), ("{}",)),
    ({"type": "number", "minimum": 1, "maximum": 1}, ("1", "1.0"), ("1.1", "0.9", "0", "2")),
    ({"type": "number", "exclusiveMinimum": 100, "maximum": 100.5}, ("100.1", "100.5"), ("100",)),
    ({"type": "number", "maximum": 0.95, "minimum": 0}, ("0.9", "0.95", "0.0"), ("0.951", "1")),
    # Negations of what strings, numbers, arrays and objects may be.
    ({"not": {"type": "integer"}}, ("1.5", '"a"', "null", "{}"),
     ("1", "-3", "1.0", "700000010005000.000000001")),
    ({"type": "string", "not": {"pattern": "^a"}}, ('"b"', '""', '"ba"'), ('"a"', '"ab"')),
    ({"type": "string", "not": {"format": "ipv4"}}, ('"a.b"', '"1::"'), ('"1.2.3.4"',)),
    ({"type": "number", "not": {"multipleOf": 10}}, ("5", "101", "10.5"), ("10", "-20.0", "0")),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("0.5",), ("1", "2.0", '"a"')),
    ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
     ('"xa"', '"bb"'), ('"ab"', '"x"')),
    ({"type": "array", "items": {"type": "integer"},
      "not": {"prefixItems": [{"const": 1}, {"const": 2}]}}, ("[2]", "[1, 3]"),
     ("[]", "[1]", "[1, 2, 5]")),
    ({"type": "array", "items": {"enum": [1, 2]},
      "not": {"contains": {"const": 1}, "minContains": 2, "maxContains": 3}},
     ("[1, 2]", "[1, 1, 1, 1]"), ("[1, 1]", "[1, 2, 1, 1]")),
    ({"type": "array", "prefixItems": [{"enum": [1, 2]}], "items": {"enum": [2, 3]},
      "contains": {"const": 3}, "minContains": 2}, ("[1, 3, 3]", "[2, 3, 2, 3]"),
     ("[1, 3]", "[3, 3]", "[]")),
    ({"type": "array", "items": {"enum": [1, 2, 3]},
      "allOf": [{"contains": {"const": 1}}, {"contains": {"const": 2}, "maxContains": 1}]},
     ("[1, 2]", "[3, 2, 1, 1]"), ("[1]", "[1, 2, 2]", "[2]")),
    ({"type": "array", "not": {"prefixItems": [True], "items": {"const": 1}}},
     ("[0, 2]", "[1, 1, 3]"), ("[]", "[5]", "[5, 1, 1]")),
    ({"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [True, 2]}],
      "uniqueItems": True}, ("[]", "[true]", "[true, 2]", "[false, true]"),
     ("[true, true]", "[true, 2, 3]")),
    ({"type": "object", "not": {"unevaluatedProperties": False,
                                "anyOf": [True, {"$ref": "#/$defs/foo"}]},
      "$defs": {"foo": {"properties": {"foo": True}}}}, ('{"bar": 1}', '{"foo": 1, "b": 2}'),
     ('{"foo": 1}', "{}")),
    ({"type": "array", "not": {"prefixItems": [True], "contains": {"const": 2},
                               "unevaluatedItems": {"const": 1}}},
     ("[0]", "[0, 3, 2]"), ("[0, 1, 2]", "[2]", "[1, 2, 2]")),
    ({"type": ["array", "object"], "not": {"enum": [[1], {"a": 1}]}},
     ("[]", "[2]", "[1, 1]", "{}", '{"a": 2}', '{"b": 1}', '{"a": 1, "b": 1}'),
     ("[1]", '{"a": 1}')),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": True},
      "additionalProperties": True,
      "not": {"additionalProperties": False, "properties": {"a": {}}}},
     ('{"b": 1}', '{"a": 1, "c": 2}'), ("{}", '{"a": 1}')),
    ({"type": "object", "not": {"patternProperties": {"^x": {"type": "null"}}}},
     ('{"x": 1}', '{"a": 1, "xy": 0}'), ("{}", '{"x": null}', '{"a": 1}')),
    ({"type": "object", "not": {"propertyNames": {"maxLength": 2}}},
     ('{"abc": 1}', '{"a": 1, "abc": 0}'), ("{}", '{"ab": 1}')),
    ({"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1, 2]}},
      "not": {"dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}}}},
     ('{"a": 1, "b": 2}',), ("{}", '{"a": 1}', '{"a": 1, "b": 1}')),
    # What other keywords leave of arrays and objects.
    ({"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": {"const": 2}},
     ("[1]", "[1, 2, 2]"), ("[1, 1]", "[2]")),
    ({"type": "array", "contains": {"const": 1}, "unevaluatedItems": {"const": 2}},
     ("[1]", "[2, 1, 2]"), ("[2]", "[1, 3]", "[]")),
    ({"type": "array", "anyOf": [{"prefixItems": [{"const": 1}]}, {"items": {"const": 2}}],
      "unevaluatedItems": False}, ("[1]", "[2, 2]", "[]"), ("[1, 2]",)),
    ({"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": {"const": 2}},
     ('{"a": 1, "b": 2}', '{"b": 2}'), ('{"b": 1}', '{"a": 2}')),
    # References by name: of resources, anchors and the only dynamic anchor of a name.
    ({"$id": "https://a.example/root", "items": {"$ref": "item#part"},
      "$defs": {"x": {"$id": "item", "$defs": {"y": {"$anchor": "part", "const": 1}}}}},
     ("[]", "[1]"), ("[2]",)),
    ({"$id": "urn:example:root", "items": {"$ref": "urn:example:root#/$defs/a%25b"},
      "$defs": {"a%b": {"const": 1}}}, ("[1]",), ("[2]",)),
    ({"items": {"$dynamicRef": "#node"}, "$defs": {"n": {"$dynamicAnchor": "node", "const": 1}}},
     ("[1]",), ("[2]",)),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "items": {"$ref": "#it"},
      "definitions": {"n": {"$id": "#it", "const": 1}}}, ("[1]",), ("[2]",)),
    ({"$ref": "sub", "$defs": {"s": {"$id": "sub", "items": {"$ref": "#/$defs/v"},
                                     "$defs": {"v": {"const": 1}}}, "v": {"const": 2}}},
     ("[1]",), ("[2]",)),
    ({"$ref": "#/$defs/a", "$dynamicRef": "#node", "$defs": {
        "a": {"minimum": 3}, "n": {"$dynamicAnchor": "node", "type": "integer"}}},
     ("3",), ("2", '"x"')),
    # A dynamic reference leads to the outermost anchor of those on the way to it.
    ({"properties": {"i": {"$ref": "ints"}, "s": {"$ref": "texts"}, "any": {"$ref": "list"}},
      "additionalProperties": False, "$defs": {
        "l": {"$id": "list", "items": {"$dynamicRef": "#node"},
              "$defs": {"n": {"$dynamicAnchor": "node"}}},
        "i": {"$id": "ints", "$ref": "list",
              "$defs": {"n": {"$dynamicAnchor": "node", "const": 1}}},
        "s": {"$id": "texts", "allOf": [{"$ref": "list"}],
              "$defs": {"n": {"$dynamicAnchor": "node", "enum": ["a", "b"]}}}}},
     ('{"i": [1, 1], "s": ["b"], "any": [null]}',), ('{"i": ["b"]}', '{"s": [1]}')),
    ({"items": {"$ref": "strict"}, "$defs": {
        "t": {"$id": "tree", "$dynamicAnchor": "node", "type": "object", "properties": {
            "v": {"const": 1}, "next": {"$dynamicRef": "#node"}}, "additionalProperties": True},
        "s": {"$id": "strict", "$dynamicAnchor": "node", "$ref": "tree",
              "unevaluatedProperties": False, "required": ["v"]}}},
     ('[{"v": 1, "next": {"v": 1}}]',), ('[{"v": 1, "next": {}}]',)),
    # The meta-schemas are known.
    ({"items": {"$ref": "http://json-schema.org/draft-07/schema#/definitions/nonNegativeInteger"}},
     ("[0, 3]",), ("[-1]", '["a"]')),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "items": {
        "$ref": "http://json-schema.org/draft-04/schema#/definitions/simpleTypes"}},
     ('["array"]',), ('["text"]', "[1]")),
    ({"$ref": "https://json-schema.org/draft/2020-12/meta/validation#/$defs/simpleTypes"},
     ('"null"',), ('"text"', "1")),
    # Names that match no pattern are judged by `additionalProperties` alone.
    ({"type": "object", "patternProperties": {"^i": {"type": "integer"}},
      "additionalProperties": {"type": "null"}}, ('{"i": 1, "b": null}',),
     ('{"i": null}', '{"b": 1}')),
)  # fmt: skip


@pytest.mark.parametrize(("schema", "yes", "no"), YES_AND_NO, ids=lambda value: str(value)[:60])
def test_what_a_grammar_takes_and_what_not(
    schema: Any, yes: tuple[str, ...], no: tuple[str, ...]
) -> None:
    assert verdict(schema) is None
    grammar = rewrite(schema, compact=False).grammar
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


def test_blanks_and_digits_have_a_bound() -> None:
    grammar = rewrite({"type": "object"}, compact=False).grammar
    assert accepts(grammar, '{\n  "a": {"b" : [1, 2]\n  }}')
    assert accepts(grammar, '{"a": 123456789012345.123456789}')
    for text in ('{  "a": 1}', '{"a":\n\n1}', '{"a": 1\t}', '{"a": 0.1234567891}', '{"a": 1e5}',
                 '{"a": 1234567890123456}', "{" + "\n" + " " * 70 + "}"):  # fmt: skip
        assert not accepts(grammar, text), text
    compact = rewrite({"type": "object"}, compact=True).grammar
    assert accepts(compact, '{"a":[1,2]}')
    assert not accepts(compact, '{"a": 1}')


def test_older_drafts_mean_what_they_meant() -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    listed = draft | {"items": [{"const": 1}], "additionalItems": {"const": 2}}
    grammar = rewrite(listed, compact=False).grammar
    assert accepts(grammar, "[1, 2, 2]") and not accepts(grammar, "[2]")
    beside = draft | {
        "$ref": "#/definitions/a",
        "maxLength": 1,
        "definitions": {"a": {"const": "xy"}},
    }
    assert accepts(rewrite(beside, compact=False).grammar, '"xy"')
    bound = {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer",
             "minimum": 3, "exclusiveMinimum": True}  # fmt: skip
    grammar = rewrite(bound, compact=False).grammar
    assert accepts(grammar, "4") and not accepts(grammar, "3")


def test_best_effort_leaves_out_what_it_cannot_follow() -> None:
    schema = {"type": "string", "pattern": "^(a)\\1", "maxLength": 3}
    assert verdict(schema) is not None
    assert verdict(schema, exact=False) is None
    found = rewrite(schema, compact=False)
    assert len(found.left_out) == 1
    assert accepts(found.grammar, '"bcd"') and not accepts(found.grammar, '"bcde"')


def test_a_bounded_string_costs_no_more_for_its_length() -> None:
    def cost(length: int) -> float:
        schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": length}}}
        started = time.thread_time()
        documents(rewrite(schema, compact=False).grammar, 1)
        return time.thread_time() - started

    cost(5)
    assert cost(50_000) < 5 * cost(5) + 0.2


def test_what_comes_to_too_much_is_counted() -> None:
    many = [{"anyOf": [{"required": [f"{a}{b}"]} for b in "xyz"]} for a in "abcdefgh"]
    with pytest.raises(UnusableError, match="more than 256 alternatives"):
        rewrite({"type": "object", "allOf": many}, compact=False)
    wide = {"type": "object", "minProperties": 150,
            "properties": {f"p{index}": {"const": index} for index in range(300)}}  # fmt: skip
    with pytest.raises(UnusableError, match="the limit is 10000"):
        rewrite(wide, compact=False)


def outcomes_of(seed: int, count: int) -> tuple[Counter[str], list[Any]]:
    """Judge generated schemas; return how many are followed, and what is wrong."""
    made, outcomes = SchemaGenerator(seed), Counter[str]()
    wrong: list[Any] = []
    for index in range(count):
        make = (made.plain, made.wild, made.combined, made.overlapping)[index % 4]
        schema = make(1 + index % 3)
        try:
            inspect(Constraint(ConstraintKind.JSON, json.dumps(schema), ""), LIMITS)
            undeclared = tuple(Undeclared)[index // 4 % 2]
            found = rewrite(schema, compact=False, undeclared=undeclared)
        except UnusableError:
            outcomes["refused"] += 1
            continue
        outcomes["left out" if found.left_out else "followed"] += 1
        if not found.left_out:
            texts = documents(found.grammar, 3, seed=index, must_end=False)
            close = InstanceGenerator(schema, index).near(texts, 10)
            texts += [text for text in close if accepts(found.grammar, text)]
            # Beside a list of values a format is an annotation, under `not` an assertion.
            lists = bool(re.search('"(enum|const)": ', json.dumps(schema)))
            for text in texts:
                bad = faults(schema, text)
                if bad and not (lists and not faults(schema, text, formats=False)):
                    wrong.append((schema, text, bad))
    return outcomes, wrong


def test_generated_schemas_are_followed_or_refused() -> None:
    outcomes, wrong = outcomes_of(seed=1, count=120)
    assert wrong == []
    assert outcomes["followed"] > 60
    assert outcomes["refused"] > 10


@pytest.mark.wide
@pytest.mark.timeout(3600)
def test_generated_schemas_are_followed_or_refused_widely() -> None:
    outcomes, wrong = outcomes_of(seed=2, count=10_000)
    print(outcomes)  # noqa: T201
    assert wrong == []
    assert outcomes["followed"] > 5_000
