"""The check against the meta-schema: of 2020-12, in one schema instead of its vocabularies."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.form.meta_schema import check_form
from server.structured_outputs.form.well_formed import is_well_formed
from tests.schema_corpus import BAD, GOOD

VALUES: tuple[Any, ...] = (5, -1, "x", None, [], [1], ["a", "a"], {}, True, {"a": 3}, "(")


def changed(schema: Any, pick: random.Random) -> Any:
    """Return a copy with one value replaced."""
    copied = copy.deepcopy(schema)
    places: list[dict[str, Any]] = []
    waiting = [copied]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            places += [part] if part else []
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    place = pick.choice(places)
    place[pick.choice(list(place))] = pick.choice(VALUES)
    return copied


def test_it_takes_what_the_vocabularies_take() -> None:
    judge = Draft202012Validator(
        Draft202012Validator.META_SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    pick, seen = random.Random(0), set()
    for schema in [*GOOD, *(schema for schema, _ in BAD)]:
        for _ in range(5):
            case = changed(schema, pick)
            if "$schema" in case:
                continue
            wanted = judge.is_valid(case)
            assert passes(case) is wanted, case
            seen.add(wanted)
    assert seen == {True, False}


def passes(schema: Any) -> bool:
    try:
        check_form(schema)
    except UnusableError:
        return False
    return True


_MALFORMED: tuple[dict[str, Any], ...] = (
    {"type": "text"},
    {"type": []},
    {"type": ["null", "null"]},
    {"required": ["a", "a"]},
    {"required": [1]},
    {"properties": {"a": 1}},
    {"properties": []},
    {"items": [], "type": "array"},
    {"allOf": []},
    {"allOf": {"a": {}}},
    {"not": 1},
    {"minLength": -1},
    {"maxItems": True},
    {"multipleOf": 0},
    {"minimum": "1"},
    {"exclusiveMinimum": True},
    {"pattern": "("},
    {"patternProperties": {"(": {}}},
    {"enum": 1},
    {"uniqueItems": 1},
    {"$ref": 1},
    {"$id": "#a#b"},
    {"$schema": {}},
    {"description": None},
)


@pytest.mark.parametrize("schema", _MALFORMED, ids=str)
def test_a_malformed_schema_is_not_taken_for_a_well_formed_one(schema: dict[str, Any]) -> None:
    assert not is_well_formed(schema, 2020)
    assert not is_well_formed({"properties": {"a": {"anyOf": [schema]}}}, 2020)
    with pytest.raises(UnusableError, match=r"\$"):
        check_form(schema)


def test_usual_schemas_need_no_meta_schema() -> None:
    usual = [schema for schema in GOOD if is_well_formed(schema, 2020)]
    assert len(usual) > 0.9 * len(GOOD)
    assert not is_well_formed({"not": True}, 4)
    assert not is_well_formed({"required": []}, 4)
    assert not is_well_formed({"exclusiveMinimum": 1}, 4)
    assert is_well_formed({"items": [{}, {}]}, 7)
    assert not is_well_formed({"items": [{}, {}]}, 2020)
