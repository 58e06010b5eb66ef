"""Anthropic's Messages API, with its own client."""

from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.conformance.target import Target, absent

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def messages(target: Target) -> Iterator[anthropic.Anthropic]:
    key = target.api_key or "none"
    with anthropic.Anthropic(base_url=target.base_url, api_key=key, max_retries=0) as client:
        try:
            client.messages.create(model=target.model, messages=HI, max_tokens=1)
        except anthropic.NotFoundError:
            absent("/v1/messages")
        yield client


def test_an_answer_has_the_documented_form(messages: anthropic.Anthropic, model: str) -> None:
    answer = messages.messages.create(model=model, messages=HI, max_tokens=8)
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert answer.usage.output_tokens > 0
    assert answer.stop_reason in ("end_turn", "max_tokens", "stop_sequence")


def test_a_stream_accumulates(messages: anthropic.Anthropic, model: str) -> None:
    with messages.messages.stream(model=model, messages=HI, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_text() == text


def test_an_unknown_model_is_not_found(messages: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        messages.messages.create(model="no-such-model", messages=HI, max_tokens=1)


CACHED: Any = {"type": "ephemeral"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"lit": {"type": "boolean"}}}
SCHEMA |= {"required": ["lit"], "additionalProperties": False}
TOOL: Any = {"name": "switch_lamp", "type": "custom", "description": "Switches the lamp."}
TOOL |= {"input_schema": SCHEMA, "cache_control": CACHED, "eager_input_streaming": True}
ON = {"type": "text", "text": "On!", "cache_control": CACHED}
AGENT: dict[str, Any] = {
    "system": [{"type": "text", "text": "You switch lamps.", "cache_control": CACHED}],
    "messages": [{"role": "user", "content": [ON]}],
    "tools": [TOOL],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "cache_control": CACHED,
}


def test_what_a_coding_agent_sends_is_taken(messages: anthropic.Anthropic, model: str) -> None:
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    answer = messages.beta.messages.create(
        model=model, max_tokens=8, context_management=edits, **AGENT
    )
    assert answer.type == "message"
    count = {name: AGENT[name] for name in ("system", "messages", "tools", "thinking")}
    counted = messages.messages.count_tokens(model=model, **count)
    usage = answer.usage
    parts = usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens
    assert sum(part or 0 for part in parts) == counted.input_tokens


def test_a_repeated_prompt_is_read_from_the_cache(
    messages: anthropic.Anthropic, model: str
) -> None:
    for _ in range(2):
        answer = messages.messages.create(model=model, max_tokens=1, **AGENT)
    assert answer.usage.cache_read_input_tokens


@pytest.mark.parametrize("strict", [False, None])
def test_a_named_tool_is_used_whatever_strict_says(
    messages: anthropic.Anthropic, model: str, strict: bool | None
) -> None:
    tool = {**TOOL} if strict is None else {**TOOL, "strict": strict}
    wish: Any = {**AGENT, "tools": [tool], "tool_choice": {"type": "tool", "name": TOOL["name"]}}
    for seed in range(6):
        hot: Any = {"temperature": 1.0 + seed / 10}
        with messages.messages.stream(model=model, max_tokens=64, extra_body=hot, **wish) as events:
            answer = events.get_final_message()
        if answer.stop_reason == "tool_use":
            (block,) = answer.content
            assert block.type == "tool_use"
            assert block.id.startswith("toolu_")
            jsonschema.validate(block.input, SCHEMA)
            return
    pytest.fail("no call was finished within 64 tokens, six times")


def test_max_tokens_is_a_bound_and_no_reservation(
    messages: anthropic.Anthropic, model: str
) -> None:
    with messages.messages.stream(model=model, messages=HI, max_tokens=64_000) as events:
        for event in events:
            if event.type == "content_block_delta":
                break


@pytest.mark.parametrize(
    "wish",
    [
        {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]},
        {"container": "container_1"},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_what_the_server_would_have_to_do_is_refused(
    messages: anthropic.Anthropic, model: str, wish: dict[str, Any]
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.messages.create(model=model, messages=HI, max_tokens=1, extra_body=wish)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"


@anthropic.beta_tool
def read_lamp(room: str) -> str:
    """Read whether the lamp of a room is lit."""
    return f"The lamp in {room} is lit."


def test_the_tool_runner_falls_back_from_threads(messages: anthropic.Anthropic, model: str) -> None:
    runner = messages.beta.messages.tool_runner(
        model=model, max_tokens=8, messages=HI, tools=[read_lamp], max_iterations=2
    )
    assert runner.until_done().role == "assistant"


def test_a_thread_is_refused_by_a_code(messages: anthropic.Anthropic, model: str) -> None:
    thread: Any = {"thread": {"type": "create"}}
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.messages.create(model=model, messages=HI, max_tokens=1, extra_body=thread)
    assert caught.value.error_code == "thread_unsupported_request"


def test_answers_and_errors_have_the_request_id(messages: anthropic.Anthropic, model: str) -> None:
    raw = messages.messages.with_raw_response.create(model=model, messages=HI, max_tokens=1)
    assert raw.request_id
    assert raw.parse()._request_id == raw.request_id
    with pytest.raises(anthropic.BadRequestError) as caught:
        messages.messages.create(model=model, messages=HI, max_tokens=-1)
    body: Any = caught.value.body
    assert caught.value.request_id == body["request_id"]


def test_models_have_their_own_form(messages: anthropic.Anthropic, model: str) -> None:
    page = messages.models.list(limit=1)
    assert page.data[0].type == "model"
    assert page.first_id == page.data[0].id
    found = messages.models.retrieve(model)
    assert (found.id, found.display_name, found.lifecycle) == (model, model, "active")
    assert found.max_input_tokens
    assert found.created_at.tzinfo is not None
    assert [one.id for one in messages.models.list()].count(model) == 1
    assert messages.models.list(after_id=model).has_more is False
    with pytest.raises(anthropic.NotFoundError):
        messages.models.list(after_id="no-such-model")
    with pytest.raises(anthropic.BadRequestError):
        messages.models.list(limit=0)


@pytest.mark.parametrize("path", ["/v1/no-such-route", "/v1/messages/no/such/route"])
def test_an_unknown_path_has_the_envelope(messages: anthropic.Anthropic, path: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        messages.post(path, cast_to=object, body={})
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["request_id"] == caught.value.request_id
