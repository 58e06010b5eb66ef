"""Undeclared parts of schemas: allowed as in JSON Schema, or omitted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.settings import ServerSettings
from server.structured_outputs.constraint import (
    Constraint,
    ConstraintKind,
    SchemaLimits,
    Undeclared,
)
from server.structured_outputs.rewriting.rewriting import rewrite
from server.structured_outputs.rewriting.tags import rewrite_tag
from server.structured_outputs.trial_job import do_job, job_bytes
from tests.schema_corpus import GOOD
from tests.server.structured_outputs.walks import accepts, documents, faults

ALLOW = Undeclared.ALLOW
_AB = {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "required": ["b"]}

ALLOWED: tuple[tuple[Any, tuple[str, ...], tuple[str, ...]], ...] = (
    ({"type": "object", **_AB},
     ('{"b": 2}', '{"b": 2, "a": 1}', '{"c": 3, "b": 2, "a": 1}', '{"x": 0, "b": 2, "y": []}'),
     ("{}", '{"a": 1}', '{"x": 1}', '{"b": 1}', '{"b": 2, "b": 2}', "[]")),
    ({"type": "object", **_AB, "additionalProperties": False},
     ('{"b": 2}', '{"c": 3, "b": 2}'), ('{"b": 2, "x": 1}', "{}", '{"c": 3}')),
    ({"type": "object", **_AB, "additionalProperties": False, "minProperties": 2,
      "maxProperties": 2}, ('{"c": 3, "b": 2}', '{"b": 2, "a": 1}'),
     ('{"b": 2}', '{"a": 1, "c": 3}', '{"a": 1, "b": 2, "c": 3}')),
    ({"type": "object", **_AB, "additionalProperties": False, "maxProperties": 1},
     ('{"b": 2}',), ('{"a": 1', '{"b": 2, "a": 1}')),
    ({"type": "object", **_AB, "maxProperties": 2}, ('{"b": 2, "x": 1}',),
     ('{"b": 2, "x": 1, "y": 1}',)),
    ({"type": "object", **_AB, "additionalProperties": {"type": "null"}},
     ('{"x": null, "b": 2, "y": null, "a": 1}',), ('{"x": 1, "b": 2}',)),
    ({"type": "object", "properties": {f"p{n}": {"const": n} for n in range(70)},
      "required": ["p69", "p1"]},
     ('{"p69": 69, "p1": 1}', '{"p1": 1, "p5": 5, "p69": 69, "x": 0}'),
     ('{"p69": 69}', '{"p1": 1, "p69": 1}', '{"p1": 1, "p69": 69, "p69": 69}')),
    ({"prefixItems": [{"const": 1}]}, ("[1, 2]", "[]", '"text"', "5"), ("[2]",)),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ("[1]",), ("[1, 2]",)),
    ({"minLength": 3}, ("5", "null", '"abc"'), ('"ab"',)),
    ({"required": ["a"]}, ('"text"', '{"a": 1, "b": 2}'), ("{}", '{"b": 1}')),
    ({"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]},
     ('{"b": 2, "z": 0, "a": 1}', "null"), ('{"b": 1}',)),
    ({"type": "object", "properties": {"a": {"const": 1}}, "unevaluatedProperties": False,
      "allOf": [{"properties": {"b": {"const": 2}}}]}, ('{"b": 2, "a": 1}',), ('{"z": 1}',)),
)  # fmt: skip


@pytest.mark.parametrize(("schema", "yes", "no"), ALLOWED, ids=lambda value: str(value)[:60])
def test_what_is_allowed(schema: Any, yes: tuple[str, ...], no: tuple[str, ...]) -> None:
    found = rewrite(schema, compact=False, undeclared=ALLOW)
    assert found.left_out == ()
    assert [text for text in yes if not accepts(found.grammar, text)] == []
    assert [text for text in no if accepts(found.grammar, text)] == []
    for text in documents(found.grammar, 2, must_end=False):
        assert faults(schema, text) == []


@pytest.mark.parametrize("schema", GOOD, ids=json.dumps)
def test_every_text_is_valid(schema: dict[str, Any]) -> None:
    found = rewrite(schema, compact=False, undeclared=ALLOW)
    assert found.left_out == ()
    for text in documents(found.grammar, 4, must_end=False):
        assert faults(schema, text) == []


def test_an_optional_property_leaves_room_for_required_ones() -> None:
    schema = {"type": "object", "properties": {name: {"const": 1} for name in "abcdef"},
              "required": ["a"], "additionalProperties": False, "maxProperties": 2}  # fmt: skip
    grammar = rewrite(schema, compact=False, undeclared=ALLOW).grammar
    # A walk fails where no token can follow.
    texts = documents(grammar, 30, must_end=False)
    assert any('"f"' in text for text in texts)


def test_omit_is_the_default_and_keeps_the_order() -> None:
    schema = {"type": "object", **_AB}
    grammar = rewrite(schema, compact=False).grammar
    assert accepts(grammar, '{"a": 1, "b": 2}')
    assert not accepts(grammar, '{"b": 2, "a": 1}')
    assert not accepts(grammar, '{"b": 2, "x": 1}')


def test_a_trial_follows_it() -> None:
    text = json.dumps({"type": "object", **_AB})
    job = job_bytes(
        [Constraint(ConstraintKind.JSON, text, "json")], SchemaLimits.of(ServerSettings())
    )
    first, second = (
        do_job(job, lambda _kind, _text: [], compact=False, undeclared=rule).grammar
        for rule in (Undeclared.OMIT, ALLOW)
    )
    assert first is not None and not accepts(first, '{"b": 2, "a": 1}')
    assert second is not None and accepts(second, '{"b": 2, "a": 1}')


def test_schemas_of_a_tag_follow_it() -> None:
    content = {"type": "json_schema", "json_schema": {"type": "object", **_AB}}
    tag = {"format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    text = '<a>{"x": 1, "b": 2}</a>'
    found = [rewrite_tag(tag, {}, compact=False, undeclared=item) for item in Undeclared]
    assert [item is not None and accepts(item.grammar, text) for item in found] == [False, True]
