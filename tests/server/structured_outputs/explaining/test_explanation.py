"""Explanations: places of a schema, sizes, and samples that the constraint allows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from rbln_backend.grammar.samples import SampleWalker
from server.settings import ServerSettings
from server.structured_outputs.constraint import (
    Constraint,
    ConstraintKind,
    SchemaLimits,
    Undeclared,
)
from server.structured_outputs.explaining.explanation import (
    SAMPLES,
    Explanation,
    answer_job,
    explain_bytes,
)
from server.structured_outputs.trial_job import TrialVerdict, job_bytes
from tests.server.structured_outputs.walks import empty_mask, vocabulary

LIMITS = SchemaLimits.of(ServerSettings())
PERSON: dict[str, Any] = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "maxLength": 8, "format": "color"},
        "age": {"type": "integer", "minimum": 0},
        "mail": {"type": "string", "format": "email"},
    },
}


class LarkTrial:
    """Trials without xgrammar and walks."""

    def __call__(self, kind: str, text: str) -> list[str]:
        assert kind == "grammar" and text
        return []

    def take_bytes(self) -> int | None:
        return 5

    def samples(
        self,
        kind: str,
        text: str,
        count: int,
        seed: int,
        *,
        most_tokens: int,
        most_s: float,
        words: Sequence[str],
    ) -> list[tuple[str, bool]]:
        assert kind == "grammar" and most_s < 1
        compiler, tokenizer, _ = vocabulary()
        stop = {int(tokenizer.eos_token_id)}
        walker = SampleWalker(compiler.vocabulary, stop, empty_mask())
        made = [compiler.compile(text, stop, in_trial=True) for _ in range(count)]
        return [walker.sample(g, seed + i, most_tokens, 5.0, words) for i, g in enumerate(made)]


def explained(
    text: Any, kind: ConstraintKind = ConstraintKind.JSON, seed: int = 0, **more: Any
) -> Explanation:
    text = text if isinstance(text, str) else json.dumps(text)
    data = explain_bytes(Constraint(kind, text, "json", **more), LIMITS, seed)
    answer = answer_job(
        data, LarkTrial(), compact=False, specials={}, on_shares=lambda _shares: None
    )
    return Explanation.from_bytes(answer)


def test_a_schema() -> None:
    found = explained(PERSON)
    assert found.verdict.reason is None
    places = {place["path"]: place["keywords"] for place in found.explained["enforced"]}
    assert places["$.properties.name"] == ["type", "maxLength"]
    assert places["$.properties.mail"] == ["type", "format"]
    narrowed = {(item["path"], item["reason"]) for item in found.explained["narrowed"]}
    assert ("$", "no other properties than the listed ones") in narrowed
    assert ("$.properties.mail", "the common part of 'email'") in narrowed
    assert found.explained["refused"] == []
    size = found.explained["grammar"]
    assert size is not None
    assert size["bytes"] == len(str(found.verdict.grammar).encode())
    assert size["rules"] is not None and size["rules"] > 5
    samples = found.explained["samples"]
    assert len(samples) == SAMPLES
    whole = [json.loads(sample["text"]) for sample in samples if sample["complete"]]
    assert len(whole) >= 3
    for value in whole:
        jsonschema.validate(value, PERSON)
    assert explained(PERSON, seed=0).explained["samples"] == samples
    assert explained(PERSON, seed=7).explained["samples"] != samples


def test_undeclared_parts_change_what_is_narrowed() -> None:
    found = explained(PERSON, undeclared=Undeclared.ALLOW).explained["narrowed"]
    assert "$" not in {item["path"] for item in found}
    samples = explained(PERSON, undeclared=Undeclared.ALLOW).explained["samples"]
    whole = [json.loads(one["text"]) for one in samples if one["complete"]]
    assert whole
    assert all(value.keys() >= {"name", "age"} for value in whole)


@pytest.mark.parametrize(
    ("schema", "path", "named"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"type": "string"}}, "$", "uniqueItems"),
        ({"type": "string", "enum": []}, "$", ""),
        ('{"type": ', "$", ""),
    ],
)
def test_a_schema_that_is_refused(schema: Any, path: str, named: str) -> None:
    found = explained(schema)
    assert found.verdict.reason
    (refused,) = found.explained["refused"]
    assert refused["path"] == path
    assert named in refused["reason"]
    assert found.explained["samples"] == []
    enforced = found.explained["enforced"]
    assert not named or ["type", "items"] in [place["keywords"] for place in enforced]


def test_a_best_effort_lists_what_it_ignores() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string"}}
    found = explained(schema, exact=False)
    assert found.verdict.reason is None
    assert [item["path"] for item in found.explained["refused"]] == ["$"]
    assert found.explained["samples"]


def test_a_grammar() -> None:
    text = "%llguidance {}\nstart: A B?\nA: /[0-9]{3}/\nB: /[a-z]/\n"
    found = explained(text, ConstraintKind.GRAMMAR).explained
    assert found["grammar"] == {"bytes": len(text), "rules": 3, "memory_bytes": 5}
    assert all(re.fullmatch("[0-9]{3}[a-z]?", one["text"]) for one in found["samples"])
    endless = explained("%llguidance {}\nstart: /a{300,}/\n", ConstraintKind.GRAMMAR).explained
    assert [one["complete"] for one in endless["samples"]] == [False] * SAMPLES


def test_other_jobs_are_answered_with_their_verdict() -> None:
    data = job_bytes([Constraint(ConstraintKind.JSON, json.dumps(PERSON), "json")], LIMITS)
    answer = answer_job(
        data, LarkTrial(), compact=False, specials={}, on_shares=lambda _shares: None
    )
    assert TrialVerdict.from_bytes(answer).grammar
