"""`benchmarks schemas` over a few schemas: verdicts of each side, and generated texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.schemas import command, soundness
from benchmarks.schemas.judging import SchemaCase, SideResult, cases_of, judge, judgements
from benchmarks.schemas.sides import SIDES
from benchmarks.schemas.soundness import Generator

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}
TESTS = [
    {"data": {"name": "A", "age": 3}, "valid": True},
    {"data": {"age": 3}, "valid": False},
    {"data": {"name": "A", "more": 1}, "valid": True},
]
PERSONS = SchemaCase("person", PERSON, TESTS)
UNIQUE = SchemaCase("unique", {"type": "array", "uniqueItems": True, "items": {}}, [])


@pytest.mark.parametrize(
    ("side", "valid_refused"),
    [("ours, omit", 1), ("ours, allow", 0), ("llguidance", 0)],
)
def test_instances_are_judged(side: str, valid_refused: int) -> None:
    found = judge(side, PERSONS)
    assert found.refused is None
    assert (found.valid_refused, found.invalid_accepted) == (valid_refused, 0)
    assert found.passes is (valid_refused == 0)
    assert found.compile_s > 0
    assert found.masks > 10
    assert 0 < found.masks_s / found.masks <= found.worst_mask_s


def test_a_refused_schema_has_a_reason() -> None:
    found = judge("ours, omit", UNIQUE)
    assert "uniqueItems" in str(found.refused)
    assert not found.passes


def test_a_file_makes_a_report(tmp_path: Path) -> None:
    file = tmp_path / "schemas.jsonl"
    lines = [
        json.dumps({"name": case.name, "schema": case.schema, "tests": case.tests})
        for case in (PERSONS, UNIQUE)
    ]
    file.write_text("\n".join(lines))
    assert [case.name for case in cases_of(file, 1)] == ["person"]
    side = next(iter(SIDES))
    found = list(judgements(side, cases_of(file)))
    assert [item.refused is None for item in found] == [True, False]
    generator = Generator()
    sound = [generator.soundness(cases_of(file), closed=rule, texts=12) for rule in (True, False)]
    run = command.SchemaRun(
        **command.begin("x"), schemas=2, sides={side: SideResult.of(found)}, soundness=sound
    )
    report = command.markdown(run)
    assert "| ours, omit | 0.0% | 50.0% | 50.0% | 0 schemas |" in report
    assert "ours, omit refuses: `uniqueItems` (1)." in report
    assert f"With `allow`, 0 of {sound[1].texts} generated texts are invalid" in report


def test_an_invalid_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar of another schema stands for one with a mistake."""
    generator = Generator()
    sound = generator.soundness([PERSONS], closed=False, texts=20)
    assert sound.texts >= 10
    assert sound.faults == []
    wrong = soundness.grammar_of({"enum": [1, {"name": "a"}]}, closed=True)
    monkeypatch.setattr(soundness, "grammar_of", lambda *_, **__: wrong)
    found = generator.soundness([PERSONS], closed=False, texts=20)
    assert 0 < len(found.faults) < found.texts
    name, text, reason = found.faults[0]
    assert (name, text) == ("person", "1")
    assert reason.startswith("jsonschema: 1 is not of type")


def test_decimals_are_judged_exactly() -> None:
    judges = list(soundness._validators({"items": {"multipleOf": 0.01}}))
    # As doubles, 4.47 / 0.01 is not an integer.
    assert soundness._fault("[4.47, 0.03, 7]", judges) == ""
    assert soundness._fault("[4.475]", judges).startswith("jsonschema: ")
