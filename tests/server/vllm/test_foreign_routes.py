"""Routes of vLLM for routers and other hosts: rendered requests equal vLLM's, /invocations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer
from tests.server.vllm.render_server import vllm_renders

pytestmark = pytest.mark.engine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
IGNORED = "x-rbln-ignored-fields"
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
MARKED = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "256")
MANIFEST = ("--disable-access-log-for-endpoints=/health,/metrics", "--shutdown-timeout", "30")
"""Flags of manifests of llm-d and KServe."""
TRUST = "--trust-request-chat-template"


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    checkpoint = checkpoints("llama", dtype="float32")
    with RealServer(checkpoint, tmp_path_factory.mktemp("r"), *FLAGS, *MANIFEST, TRUST) as up:
        up.until_ready()
        yield up


@pytest.fixture(scope="module")
def reference(checkpoints: CheckpointCache) -> Iterator[TestClient]:
    with vllm_renders(checkpoints("llama", dtype="float32"), *FLAGS, TRUST) as client:
        yield client


def without_id(rendered: Any) -> Any:
    if isinstance(rendered, list):
        return [without_id(one) for one in rendered]
    identity = rendered.pop("request_id")
    assert identity.startswith(("chatcmpl-", "cmpl-"))
    return rendered


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TURNS}),
        (CHAT, {"messages": TURNS, "model": "tiny", "max_tokens": 7, "stream": True}),
        (CHAT, {"messages": TURNS, "temperature": 0.3, "top_p": 0.5, "seed": 3, "n": 2}),
        (CHAT, {"messages": TURNS, "stop": ["x"], "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": TURNS, "response_format": {"type": "json_object"}}),
        (CHAT, {"messages": TURNS, "cache_salt": "of a tenant", "logit_bias": {"5": 1.0}}),
        (CHAT, {"messages": TURNS, "add_generation_prompt": False, "bad_words": ["no"]}),
        (CHAT, {"messages": TURNS, "tools": [{"type": "function", "function": WEATHER}]}),
        (
            CHAT,
            {
                "messages": TURNS,
                "chat_template": MARKED,
                "return_assistant_tokens_mask": True,
                "return_token_offsets": True,
            },
        ),
        (COMPLETION, {"prompt": "once upon"}),
        (COMPLETION, {"prompt": ["a b", "c"], "max_tokens": 3, "return_token_offsets": True}),
        (COMPLETION, {"prompt": [[5, 6, 7]], "stream": True, "stream_options": {}}),
        (COMPLETION, {"prompt": "a b c d", "truncate_prompt_tokens": 2, "echo": True}),
    ],
)
def test_an_answer_is_that_of_vllm(
    server: RealServer, reference: TestClient, path: str, body: dict[str, Any]
) -> None:
    ours = server.client.post(f"{path}/render", json=body)
    theirs = reference.post(f"{path}/render", json=body)
    assert ours.status_code == theirs.status_code == 200, (ours.text, theirs.text)
    assert without_id(ours.json()) == without_id(theirs.json())
    assert IGNORED not in ours.headers


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a_prompt_is_that_of_the_generation(server: RealServer, choice: str) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    body = {"messages": TURNS, "tools": tools, "tool_choice": choice, "max_tokens": 1}
    rendered = server.client.post(f"{CHAT}/render", json=body).json()
    answer = server.client.post(CHAT, json={**body, "return_token_ids": True}).json()
    assert rendered["token_ids"] == answer["prompt_token_ids"]


def test_fields_without_a_place_in_the_answer_are_named(server: RealServer) -> None:
    guess = {"type": "content", "content": "x"}
    body = {"messages": TURNS, "prediction": guess, "return_token_ids": True, "speculative": False}
    answer = server.client.post(f"{CHAT}/render", json=body)
    assert answer.status_code == 200
    assert answer.headers[IGNORED] == "prediction, return_token_ids, speculative"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (CHAT, {"messages": TURNS, "model": "other"}, 404, "model_not_found"),
        (CHAT, {"messages": TURNS, "use_beam_search": True}, 400, "unsupported_field"),
        (CHAT, {"messages": TURNS, "surprise": 1}, 400, "unknown_field"),
        (CHAT, {"prompt": "a"}, 400, "unknown_field"),
        (COMPLETION, {"prompt": "a", "use_beam_search": True}, 400, "unsupported_field"),
        (COMPLETION, {"prompt": "a " * 400}, 400, "context_length_exceeded"),
    ],
)
def test_errors_have_the_form_of_the_api(
    server: RealServer, path: str, body: dict[str, Any], status: int, code: str
) -> None:
    answer = server.client.post(f"{path}/render", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_rendered_request_generates_nothing(server: RealServer) -> None:
    before = server.metric("vllm:request_success_total")
    answer = server.client.post(f"{CHAT}/render", json={"messages": TURNS, "n": 4})
    assert answer.json()["sampling_params"]["n"] == 4
    assert server.metric("vllm:request_success_total") == before


def test_invocations_are_answered_by_their_fields(server: RealServer) -> None:
    chat = server.client.post("/invocations", json={"messages": TURNS, "max_tokens": 2})
    assert (chat.status_code, chat.json()["object"]) == (200, "chat.completion")
    text = server.client.post("/invocations", json={"prompt": "hi", "max_tokens": 2})
    assert (text.status_code, text.json()["object"]) == (200, "text_completion")
    body = {"messages": TURNS, "max_tokens": 2, "stream": True}
    lines = server.client.post("/invocations", json=body).text.split("\n\n")
    assert lines[0].startswith('data: {"id":"chatcmpl-')
    assert lines[-2] == "data: [DONE]"
    answered = 'rbln_http_requests_total{code="200",method="POST",outcome="ok",route="/invocations"'
    # A stream is counted after its last byte.
    deadline = time.monotonic() + 10
    while server.metric(answered) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.metric(answered) == 3


@pytest.mark.parametrize(
    ("content", "headers", "code"),
    [
        (b'{"input": "hi"}', {}, "missing_field"),
        (b"[[]]", {}, "invalid_json"),
        (b'{"prompt": "hi"', {}, "invalid_json"),
        (b'{"prompt": "hi", "surprise": 1}', {}, "unknown_field"),
        (b'{"prompt": "hi"}', {"x-amzn-sagemaker-session-id": "NEW_SESSION"}, "unsupported_field"),
        (b'{"prompt": "hi"}', {"x-amzn-sagemaker-adapter-identifier": "a"}, "model_not_found"),
    ],
)
def test_wrong_invocations(
    server: RealServer, content: bytes, headers: dict[str, str], code: str
) -> None:
    answer = server.client.post(
        "/invocations", content=content, headers={"content-type": "application/json", **headers}
    )
    assert answer.json()["error"]["code"] == code


def test_the_document_has_these_routes(server: RealServer) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    for path in ("/invocations", f"{CHAT}/render", f"{COMPLETION}/render", "/ping"):
        assert "post" in paths[path]
