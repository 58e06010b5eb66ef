"""This server's /openapi.json, and what it answers to requests that schemathesis makes of it."""

import copy
import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.request.endpoints import ROUTES
from tests.conformance.own_server import ADMIN_KEY
from tests.conformance.target import Target

pytestmark = pytest.mark.engine

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# The refusals of wrong requests have tests by field; one made here takes as long as a right one.
EXAMPLES, MANY_EXAMPLES = 2, 6
# An adapter of any name may be asked for; these would end the tests that follow.
LEFT_OUT = {"/admin/drain", "/admin/undrain"}


@pytest.fixture(scope="module")
def document(target: Target) -> dict[str, Any]:
    if not target.ours:
        pytest.skip("only of this server")
    with target.http() as http:
        answer = http.get("/openapi.json")
    found: dict[str, Any] = answer.json()
    return found


def test_every_route_is_described_and_no_other(document: dict[str, Any]) -> None:
    pooling = {"/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score"}
    pooling |= {"/rerank", "/v1/rerank", "/v2/rerank"}
    assert set(document["paths"]) == {route.template for route in ROUTES} - pooling


FEW = {"type": "integer", "minimum": 1, "maximum": 8}
MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"type": "string", "minLength": 1, "maxLength": 20},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
KIND: dict[str, Any] = {
    "model": {"const": "tiny"},
    "n": {"enum": [1, 2]},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), FEW),
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3},
    "prompt": MESSAGE["properties"]["content"],  # type: ignore[index]
}

COMPLETIONS = ("CompletionRequest", "RenderCompletionRequest")


def shaped(document: dict[str, Any]) -> dict[str, Any]:
    """The document with requests half of which reach the model, and end soon."""
    document = copy.deepcopy(document)
    for name, schema in document["components"]["schemas"].items():
        properties = schema.get("properties", {})
        if "Request" not in name or name == "GenerateRequest":  # that one is an answer
            continue
        for field in KIND.keys() & properties.keys():
            free = field in ("messages", "prompt")
            if field == "prompt" and name not in COMPLETIONS:
                continue
            properties[field] = {"anyOf": [KIND[field], properties[field]]} if free else KIND[field]
        for field in ("stream_options", "stream_interval", "prompt_embeds", "priority"):
            properties.pop(field, None)
        if name in COMPLETIONS:
            schema["required"] = [*schema.get("required", []), "prompt"]
    return document


@pytest.mark.parametrize(
    ("mode", "examples"),
    [
        (GenerationMode.POSITIVE, EXAMPLES),
        *(pytest.param(mode, MANY_EXAMPLES, marks=pytest.mark.wide) for mode in GenerationMode),
    ],
)
def test_no_request_gets_what_is_not_declared(
    target: Target, document: dict[str, Any], mode: GenerationMode, examples: int
) -> None:
    failures: list[str] = []
    for result in schemathesis.openapi.from_dict(shaped(document)).get_all_operations():
        operation = result.ok()
        if operation.path in LEFT_OUT:
            continue

        @settings(
            max_examples=int(os.environ.get("CONFORMANCE_EXAMPLES", examples)),
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            headers = {"x-api-key": ADMIN_KEY}
            # A busy machine may need longer than the 10 s of schemathesis.
            answer = case.call(base_url=target.base_url, headers=headers, timeout=100)
            try:
                case.validate_response(answer, checks=CHECKS)
            except FailureGroup as group:
                shown = f"{answer.status_code} {answer.text[:300]}"
                sent = case.as_curl_command()[:2000]
                failures.extend(f"{error}: {shown} of {sent}" for error in group.exceptions)

        try:
            one()
        except Unsatisfiable:
            # A request without query or body cannot be made wrong; a path is any text.
            parts = (operation.query, operation.headers, operation.body)
            assert not any(list(part) for part in parts), operation.label
    assert not failures, "\n\n".join(failures[:20])
