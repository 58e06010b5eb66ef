"""`/v1/structured_outputs/explain` and `undeclared_properties` over a real server of ours."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.conformance.target import Target

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}, "y": {"enum": [3]}},
    "required": ["x", "y"],
}
PATH = "/v1/structured_outputs/explain"


@pytest.fixture(autouse=True)
def of_ours(target: Target) -> None:
    if not target.ours:
        pytest.skip("a route of rbln-serve")


def explain(target: Target, **body: Any) -> Any:
    with target.http() as client:
        return client.post(PATH, json=body).json()


def test_a_schema_is_explained(target: Target) -> None:
    found = explain(target, json=POINT, seed=3)
    assert (found["valid"], found["reason"], found["param"]) == (True, None, "json")
    assert found["compile_ms"] > 0
    assert 0 < found["grammar"]["memory_bytes"] < 1 << 20
    assert {"path": "$.properties.y", "keywords": ["enum"]} in found["enforced"]
    assert len(found["samples"]) == 5
    for sample in found["samples"]:
        assert sample["complete"]
        assert list(json.loads(sample["text"])) == ["x", "y"]
    open_ = explain(target, json=POINT, undeclared_properties="allow")
    assert open_["grammar"]["bytes"] != found["grammar"]["bytes"]
    assert "$" not in [item["path"] for item in open_["narrowed"]]


def test_a_regex_and_a_refusal_are_explained(target: Target) -> None:
    found = explain(target, regex="[ab]{4}")
    assert (found["grammar"]["bytes"], found["grammar"]["rules"]) == (7, None)
    assert all(re.fullmatch("[ab]{4}", sample["text"]) for sample in found["samples"])
    refused = explain(target, json={"type": "string", "not": {"format": "uuid"}})
    assert not refused["valid"] or refused["refused"] == []
    for body in ({}, {"json": {}, "seed": -1}, {"json": {}, "undeclared_properties": "no"}):
        assert explain(target, **body)["error"]["code"] in ("invalid_value", "missing_field")


MESSAGES = [{"role": "user", "content": "A point."}]
NAMED = {"type": "json_schema", "name": "p", "schema": POINT}
# The request of each route, and the keys that lead to its text.
ROUTES: tuple[tuple[str, dict[str, Any], tuple[str | int, ...]], ...] = (
    ("/v1/chat/completions",
     {"messages": MESSAGES, "max_tokens": 16,
      "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}},
     ("choices", 0, "message", "content")),
    ("/v1/completions",
     {"prompt": "A point: ", "max_tokens": 16, "structured_outputs": {"json": POINT}},
     ("choices", 0, "text")),
    ("/v1/responses",
     {"input": "A point.", "max_output_tokens": 16, "store": False, "text": {"format": NAMED}},
     ("output", 0, "content", 0, "text")),
    ("/v1/messages",
     {"messages": MESSAGES, "max_tokens": 16,
      "output_config": {"format": {"type": "json_schema", "schema": POINT}}},
     ("content", 0, "text")),
)  # fmt: skip


@pytest.mark.parametrize(("path", "body", "keys"), ROUTES, ids=lambda value: str(value)[:20])
def test_requests_choose_their_rule(
    target: Target, path: str, body: dict[str, Any], keys: tuple[str | int, ...]
) -> None:
    """With `omit` an answer begins with the first property, with `allow` with any name."""
    begins = {"omit": set[bool](), "allow": set[bool]()}
    with target.http() as client:
        for rule, found in begins.items():
            for seed in range(4):
                wish = {**body, "undeclared_properties": rule, "temperature": 1.0}
                wish |= {"model": target.model}
                # Anthropic's API has no seed.
                wish |= {} if path == "/v1/messages" else {"seed": seed}
                text: Any = client.post(path, json=wish).json()
                for key in keys:
                    text = text[key]
                found.add(re.match(r'\{\s*"x"', text) is not None)
        wrong = client.post(path, json={**body, "model": target.model, "undeclared_properties": 1})
    assert begins["omit"] == {True}
    assert False in begins["allow"]
    assert wrong.status_code == 400
    assert "undeclared_properties" in wrong.text


def test_tools_follow_the_rule_of_their_request(target: Target) -> None:
    function = {"name": "plot", "parameters": POINT}
    body: dict[str, Any] = {
        "model": target.model,
        "messages": [{"role": "user", "content": "A point."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "max_tokens": 64,
    }
    begins = {"omit": set[bool](), "allow": set[bool]()}
    with target.http() as client:
        for rule, found in begins.items():
            for seed in range(4):
                wish = {**body, "seed": seed, "undeclared_properties": rule}
                answer = client.post("/v1/chat/completions", json=wish).json()
                for call in answer["choices"][0]["message"]["tool_calls"]:
                    arguments = call["function"]["arguments"]
                    found.add(re.match(r'\{\s*"x"', arguments) is not None)
    assert begins["omit"] == {True}
    assert False in begins["allow"]
