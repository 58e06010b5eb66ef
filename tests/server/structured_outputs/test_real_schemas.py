"""Schemas as the world writes them: followed to the letter, or refused for a reason we name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.settings import ServerSettings
from server.structured_outputs.constraint import Constraint, ConstraintKind, SchemaLimits
from server.structured_outputs.grammars import SchemaRules
from server.structured_outputs.trial import do_job, job_bytes
from tests.server.structured_outputs.walks import documents, faults, grammar_of, try_grammar

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


def verdict(schema: Any) -> str | None:
    constraint = Constraint(ConstraintKind.JSON, json.dumps(schema), "json")
    job = job_bytes([constraint], SchemaLimits.of(ServerSettings()))
    return do_job(job, try_grammar, SchemaRules(compact=False, closed=True)).reason


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
