"""The check against the meta-schema: of 2020-12, in one schema instead of its vocabularies."""

from __future__ import annotations

import copy
import random
from typing import Any

from jsonschema.validators import Draft202012Validator

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.schema_form import check_form
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
            assert is_well_formed(case) is wanted, case
            seen.add(wanted)
    assert seen == {True, False}


def is_well_formed(schema: Any) -> bool:
    try:
        check_form(schema)
    except UnusableError:
        return False
    return True
