"""Schemas as the world writes them: followed to the letter, or refused for a reason we name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.settings import ServerSettings
from server.structured_outputs.constraint import Constraint, ConstraintKind, SchemaLimits
from server.structured_outputs.rewriting.rewriting import rewrite
from server.structured_outputs.trial_job import do_job, job_bytes
from tests.server.structured_outputs.walks import documents, faults

FOLDER = Path(__file__).parent / "schemas"
SCHEMAS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.json"))}
REFUSED = {
    "package_json_keywords": "'uniqueItems'",
    "remote_reference": "leads to another document",
}
"""A word of the reason; each is in the table of docs/structured_outputs.md."""
WALKS = 4


def verdict(text: str) -> str | None:
    constraint = Constraint(ConstraintKind.JSON, text, "json")
    job = job_bytes([constraint], SchemaLimits.of(ServerSettings()))
    return do_job(job, lambda _kind, _text: [], compact=False).reason


def test_there_are_forty_and_most_are_followed() -> None:
    assert len(SCHEMAS) >= 40
    assert REFUSED.keys() <= SCHEMAS.keys()
    assert len(REFUSED) <= 5


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
    schema = json.loads(SCHEMAS[name])
    texts = documents(rewrite(schema, compact=False).grammar, count)
    assert len(set(texts)) > 1
    return [(text, found) for text in texts if (found := faults(schema, text))]
