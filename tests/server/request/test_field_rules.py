"""Every field that Anthropic's and OpenAI's clients can send has its treatment, and gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    input_token_count_params,
    response_compact_params,
    response_create_params,
)

from server.errors import UnsupportedFieldError
from server.request.fields import FieldAction
from server.request.rules import apply_field_rules
from server.request.tables import FIELDS, extra_schemas, refused_fields
from server.vllm.models import request_models
from server.wire import Endpoint

DOCUMENTED: Mapping[Endpoint, tuple[Any, ...]] = {
    Endpoint.MESSAGES: (
        message_create_params.MessageCreateParamsNonStreaming,
        beta_create_params.MessageCreateParamsNonStreaming,
    ),
    Endpoint.COUNT_TOKENS: (
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ),
    Endpoint.CHAT: (chat_create_params.CompletionCreateParamsNonStreaming,),
    Endpoint.COMPLETION: (completion_create_params.CompletionCreateParamsNonStreaming,),
    Endpoint.RESPONSES: (response_create_params.ResponseCreateParamsNonStreaming,),
    Endpoint.INPUT_TOKENS: (input_token_count_params.InputTokenCountParams,),
    Endpoint.COMPACT: (response_compact_params.ResponseCompactParams,),
}
# A header of Anthropic's, which its client takes for a parameter.
HEADERS = {"betas"}
WORKED_ON_HERE = {"thinking", "prediction", "return_progress", "service_tier", "speculative"}
WORKED_ON_HERE |= {"messages[].reasoning_content", "reasoning.effort", "output_config.effort"}


def paths(endpoint: Endpoint, *actions: FieldAction) -> set[str]:
    return {row.path for row in FIELDS[endpoint] if row.action in (actions or [*FieldAction])}


@pytest.mark.parametrize("endpoint", DOCUMENTED)
def test_every_documented_field_has_a_treatment(endpoint: Endpoint) -> None:
    documented = set[str]()
    for params in DOCUMENTED[endpoint]:
        documented |= params.__annotations__.keys()
    assert documented - HEADERS - paths(endpoint) == set()


@pytest.mark.parametrize("endpoint", [e for e in DOCUMENTED if e is not Endpoint.COUNT_TOKENS])
def test_what_is_obeyed_is_known_to_the_request_model(endpoint: Endpoint) -> None:
    known = get_type_hints(request_models()[endpoint.name.lower()])
    assert paths(endpoint, FieldAction.OBEYED) - known.keys() <= WORKED_ON_HERE


@pytest.mark.parametrize("endpoint", Endpoint)
def test_no_field_is_treated_twice(endpoint: Endpoint) -> None:
    places = [(row.path, str(row.when), row.only) for row in FIELDS[endpoint]]
    assert len(set(places)) == len(places)
    unexplained = {row.action for row in FIELDS[endpoint] if not row.why}
    assert unexplained <= {None, FieldAction.OBEYED}


CACHED = {"type": "ephemeral"}


def test_a_coding_agents_request_is_taken() -> None:
    body: dict[str, Any] = {
        "model": "m",
        "system": [{"type": "text", "text": "You", "cache_control": CACHED}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": CACHED}]},
            {"role": "user", "content": "b"},
        ],
        "tools": [
            {"name": "f", "type": "custom", "input_schema": {}, "eager_input_streaming": True},
            {"name": "g", "input_schema": {"type": "object"}, "input_examples": [{}]},
        ],
        "metadata": {"user_id": "u"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 9}},
        "mcp_servers": [],
        "container": None,
        "stream": True,
    }
    ignored = apply_field_rules(Endpoint.MESSAGES, body)
    assert ignored == ["metadata", "output_config.task_budget", "tools[].input_examples"]
    assert body == {
        "model": "m",
        "system": [{"type": "text", "text": "You"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "user", "content": "b"},
        ],
        "tools": [
            {"name": "f", "input_schema": {}},
            {"name": "g", "input_schema": {"type": "object"}},
        ],
        "output_config": {"effort": "high"},
        "stream": True,
    }


@pytest.mark.parametrize(
    ("endpoint", "body", "left", "ignored"),
    [
        (Endpoint.CHAT, {"verbosity": "low", "seed": 1}, {"seed": 1}, ["verbosity"]),
        (Endpoint.CHAT, {"verbosity": "medium", "store": False}, {}, []),
        (Endpoint.CHAT, {"kv_transfer_params": None}, {"kv_transfer_params": None}, []),
        (
            Endpoint.CHAT,
            {"stream_options": {"include_usage": True, "include_obfuscation": True}},
            {"stream_options": {"include_usage": True}},
            ["stream_options.include_obfuscation"],
        ),
        (
            Endpoint.RESPONSES,
            {
                "tools": [
                    {"type": "web_search", "external_web_access": False},
                    {"type": "function", "name": "f"},
                ]
            },
            {"tools": [{"type": "function", "name": "f"}]},
            ["tools[]"],
        ),
        (Endpoint.EMBEDDINGS, {"input": "a", "user": "me"}, {"input": "a"}, ["user"]),
        *(
            (
                endpoint,
                {"store": True, "cache_prompt": False, "mirostat": 2, "keep_alive": "5m"},
                {},
                ["cache_prompt", "keep_alive", "mirostat", "store"],
            )
            for endpoint in (Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.TOKENIZE)
        ),
        (Endpoint.CHAT, {"cache_prompt": True, "mirostat": 0, "store": None}, {}, []),
        *((endpoint, {"request_id": "a/b"}, {}, ["request_id"]) for endpoint in Endpoint),
        (
            Endpoint.RESPONSES,
            {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
            {"include": ["message.output_text.logprobs"]},
            ["include[]"],
        ),
        (Endpoint.COMPLETION, {"best_of": 1}, {}, []),
    ],
)
def test_what_is_harmless_is_taken_off_and_told(
    endpoint: Endpoint, body: dict[str, Any], left: dict[str, Any], ignored: list[str]
) -> None:
    assert apply_field_rules(endpoint, body) == ignored
    assert body == left


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (Endpoint.MESSAGES, {"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        (Endpoint.MESSAGES, {"container": "c_1"}, "container"),
        (Endpoint.MESSAGES, {"tools": [{}, {"type": "web_search_20250305"}]}, "tools[1].type"),
        (
            Endpoint.MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0].type",
        ),
        (Endpoint.COUNT_TOKENS, {"thread": {"type": "create"}}, "thread"),
        (Endpoint.CHAT, {"web_search_options": {}}, "web_search_options"),
        # As JSON has them, 0 is not false.
        (Endpoint.CHAT, {"return_token_offsets": 0.0}, "return_token_offsets"),
        (Endpoint.RESPONSES, {"include": ["web_search_call.results"]}, "include[0]"),
        (
            Endpoint.RESPONSES,
            {"include": ["message.output_text.logprobs", "file_search_call.results"]},
            "include[1]",
        ),
        (Endpoint.COMPLETION, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (Endpoint.EMBEDDINGS, {"padding": "max_length"}, "padding"),
        (Endpoint.CHAT, {"functions": []}, "functions"),
        (Endpoint.CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (Endpoint.RESPONSES, {"conversation": "conv_1"}, "conversation"),
        (Endpoint.RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (Endpoint.COMPLETION, {"best_of": 2}, "best_of"),
    ],
)
def test_what_would_make_a_wrong_answer_is_refused_by_name(
    endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        apply_field_rules(endpoint, body)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


@pytest.mark.parametrize("wrong", [None, 7, "text", [], [7], {"content": 7}])
def test_values_of_wrong_types_are_left_to_the_request_models(wrong: object) -> None:
    body = {"messages": wrong, "tools": wrong, "system": wrong, "output_config": wrong}
    assert apply_field_rules(Endpoint.MESSAGES, body) == []
    assert body["messages"] == wrong


def test_the_openapi_document_knows_what_is_taken() -> None:
    extra = extra_schemas(Endpoint.CHAT)
    assert "description" in extra["store"]
    assert extra["modalities"] == {"enum": [["text"], None]}
    assert "description" in extra["verbosity"]
    assert "web_search_options" not in extra
    assert {"web_search_options", "ec_transfer_params"} <= refused_fields(Endpoint.CHAT)


@pytest.mark.parametrize("endpoint", [Endpoint.RERANK, Endpoint.RERANK_V1, Endpoint.RERANK_V2])
def test_fields_of_rerankers_clients_are_taken(endpoint: Endpoint) -> None:
    """LiteLLM, Cohere's and Voyage's clients send these by default."""
    body: dict[str, Any] = {"return_documents": True, "input_type": "query", "query": "a"}
    assert apply_field_rules(endpoint, body) == ["input_type"]
    assert body == {"query": "a"}
    assert apply_field_rules(endpoint, {"return_documents": False}) == ["return_documents"]
    assert apply_field_rules(endpoint, {"rank_fields": ["text"], "max_chunks_per_doc": 1}) == []
    for field in ({"rank_fields": ["title"]}, {"max_chunks_per_doc": 10}):
        with pytest.raises(UnsupportedFieldError) as caught:
            apply_field_rules(endpoint, dict(field))
        assert caught.value.param in field
