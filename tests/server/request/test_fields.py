"""Which fields are taken, what a request may ask for, and how pydantic's complaints read."""

import dataclasses
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
from starlette.datastructures import Headers

from rbln_backend.config import BACKGROUND_PRIORITY, FIRST_PRIORITY
from server.errors import (
    ContextLengthError,
    InvalidSchemaError,
    InvalidValueError,
    MissingFieldError,
    OverloadedError,
    ServerError,
    UnknownFieldError,
    UnsupportedFieldError,
)
from server.request.options import Tier, check_headers
from server.request.rules import accepted_fields, apply_field_rules
from server.request.sizes import RequestLimits
from server.request.tables import FIELDS, FieldAction, extra_schemas, refused_fields
from server.request.values import check_values
from server.vllm.models import request_models
from server.wire import Endpoint
from tests.server.request.limits import LIMITS

KNOWN = ("messages", "temperature", "stream", "stream_options", "tools", "length_penalty")
MESSAGE = {"role": "user", "content": "hi"}


def accept(**body: Any) -> dict[str, Any]:
    fields, ignored = accepted_fields(body, KNOWN, ("messages",), "reject", Endpoint.CHAT)
    assert not ignored
    return fields


def check(body: dict[str, Any], limits: RequestLimits = LIMITS) -> None:
    check_values(Endpoint.COMPLETION if "prompt" in body else Endpoint.CHAT, body, limits, {})


def test_known_fields_pass_unchanged() -> None:
    assert accept(temperature=1, tools=[]) == {"temperature": 1, "tools": []}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temprature", 1, "did you mean 'temperature'?"),
        ("verbosit", 1, "did you mean 'verbosity'?"),
        ("xyz", 0, "Unknown field 'xyz' (with --unknown-fields warn"),
        ("guided_json", {}, "Unknown field 'guided_json' (with --unknown-fields warn"),
        ("best_of", 2, "n"),
    ],
)
def test_unknown_fields_are_refused_by_name(field: str, value: object, words: str) -> None:
    with pytest.raises(UnknownFieldError) as caught:
        accept(**{field: value})
    assert caught.value.param == field
    assert words in caught.value.message
    assert "--unknown-fields warn" in caught.value.message


def test_unknown_fields_can_be_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    given = {"xyz": 1, "stream": True}
    assert accepted_fields(given, KNOWN, (), "warn", Endpoint.CHAT) == ({"stream": True}, [])


def test_null_is_as_absent_but_for_required_fields() -> None:
    given = {"xyz": None, "stream": None, "messages": None, "temperature": 0}
    fields, ignored = accepted_fields(given, KNOWN, ("messages",), "reject", Endpoint.CHAT)
    assert fields == {"messages": None, "temperature": 0}
    assert ignored == ["xyz"]


def test_fields_without_effect_are_refused() -> None:
    assert accept(length_penalty=1) == {"length_penalty": 1}
    with pytest.raises(UnsupportedFieldError):
        accept(length_penalty=2)


def test_stream_options_need_a_stream() -> None:
    assert accept(stream=True, stream_options={})
    for stream in ({}, {"stream": False}, {"stream": None}):
        with pytest.raises(InvalidValueError) as caught:
            accept(stream_options={"include_usage": True}, **stream)
        assert caught.value.param == "stream_options"


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"n": 5}, InvalidValueError, "n"),
        ({"n": 0}, InvalidValueError, "n"),
        ({"priority": 1}, UnsupportedFieldError, "priority"),
        ({"stop": ["a", "b", "c"]}, InvalidValueError, "stop"),
        ({"stop_sequences": ["a", "b", "c"]}, InvalidValueError, "stop_sequences"),
        ({"logit_bias": {"1": 1, "2": 1, "3": 1, "4": 1}}, InvalidValueError, "logit_bias"),
        ({"max_tokens": 101}, ContextLengthError, "max_tokens"),
        ({"max_completion_tokens": 10**30}, ContextLengthError, "max_completion_tokens"),
        ({"messages": []}, InvalidValueError, "messages"),
        ({"messages": [MESSAGE, {"content": "x"}]}, MissingFieldError, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, MissingFieldError, "messages[0].content"),
        ({"prompt": ""}, InvalidValueError, "prompt"),
        ({"prompt": []}, InvalidValueError, "prompt"),
        ({"prompt": [[]]}, InvalidValueError, "prompt"),
        ({"prompt": ["", "x"]}, InvalidValueError, "prompt[0]"),
        ({"prompt": [[5], []]}, InvalidValueError, "prompt[1]"),
        ({"truncate_prompt_tokens": 0}, InvalidValueError, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 101}, InvalidValueError, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, InvalidValueError, "truncate_prompt_tokens"),
        ({"vllm_xargs": {"a": 1}}, UnsupportedFieldError, "vllm_xargs"),
        ({"vllm_xargs": {"kv_transfer_params": "a"}}, UnsupportedFieldError, "vllm_xargs"),
        ({"use_beam_search": True, "seed": 1}, UnsupportedFieldError, "seed"),
        ({"use_beam_search": True, "stop": ["a"]}, UnsupportedFieldError, "stop"),
        ({"use_beam_search": True, "prompt_logprobs": 0}, UnsupportedFieldError, "prompt_logprobs"),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, UnsupportedFieldError, "echo"),
        (
            {"use_beam_search": True, "response_format": {"type": "json_object"}},
            UnsupportedFieldError,
            "response_format",
        ),
        ({"prompt": [1, 50]}, InvalidValueError, "prompt[1]"),
        ({"prompt": [[1], [1, 50]]}, InvalidValueError, "prompt[1][1]"),
        ({"prompt": [[1] * 90] * 2}, OverloadedError, "prompt"),
        ({"tokens": [-1]}, InvalidValueError, "tokens[0]"),
        (
            {"tools": [{"function": {"parameters": {"type": "string"}}}]},
            InvalidSchemaError,
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{}, {"input_schema": {"type": ["null", "array"]}}]},
            InvalidSchemaError,
            "tools[1].input_schema",
        ),
    ],
)
def test_limits(body: dict[str, Any], error: type[ServerError], param: str) -> None:
    with pytest.raises(error) as caught:
        check(body)
    assert caught.value.param == param


def test_what_is_within_the_limits_passes() -> None:
    turns = [MESSAGE, {"role": "assistant", "tool_calls": []}]
    check({"messages": turns, "n": 4, "priority": 0, "max_tokens": 100})
    check({"prompt": ["a"] * 3})
    beams = {"use_beam_search": True, "n": 2, "temperature": 0, "logprobs": 1, "stop": []}
    check(beams | {"top_p": 1})
    check({"use_beam_search": False, "seed": 1, "vllm_xargs": {}})
    check({"prompt": [49] * 90})
    check({"messages": "wrong type", "n": "two", "tools": [7, {"function": 7}]})
    check({"tools": [{"parameters": {"type": ["object", "null"]}}, {"name": "a"}]})


def test_limits_are_named_with_their_numbers() -> None:
    with pytest.raises(InvalidValueError, match=r"'stop' must have at most 2 items .* got 3"):
        check({"stop": ["a", "b", "c"]})
    check({"stop": ["a", "b"], "logit_bias": {"1": 1, "2": 1, "3": 1}})


def test_extra_arguments_are_those_that_something_reads() -> None:
    events = dataclasses.replace(LIMITS, extra_args=frozenset(("kv_cache_report_mode",)))
    check({"vllm_xargs": {"kv_cache_report_mode": "full"}}, events)
    with pytest.raises(InvalidValueError, match="incremental, full") as caught:
        check({"vllm_xargs": {"kv_cache_report_mode": "all"}}, events)
    assert caught.value.param == "vllm_xargs.kv_cache_report_mode"
    with pytest.raises(UnsupportedFieldError, match="may have kv_cache_report_mode on this"):
        check({"vllm_xargs": {"other": 1}}, events)
    processors = dataclasses.replace(LIMITS, extra_args=None)
    check({"vllm_xargs": {"other": 1}}, processors)
    for name in ("kv_transfer_params", "ec_transfer_params", "speculation"):
        with pytest.raises(UnsupportedFieldError):
            check({"vllm_xargs": {name: "a"}}, processors)


def _check_headers(
    headers: Headers,
    priority: object = None,
    tier: Tier | None = None,
    *,
    has_priorities: bool = True,
) -> None:
    check_headers(headers, priority, tier, has_priorities=has_priorities, num_ranks=1)


def test_a_tier_with_a_priority_of_its_own_has_no_other() -> None:
    headers = Headers({"X-Vllm-Priority": "-3"})
    for tier in (None, Tier.DEFAULT):
        _check_headers(headers, 5, tier)
    for tier in (Tier.FLEX, Tier.PRIORITY):
        _check_headers(Headers({}), 0, tier)
        with pytest.raises(UnsupportedFieldError, match=f"service tier '{tier.value}'") as caught:
            _check_headers(Headers({}), 5, tier)
        assert caught.value.param == "priority"
        with pytest.raises(UnsupportedFieldError) as caught:
            _check_headers(headers, tier=tier)
        assert caught.value.param == "X-Vllm-Priority"


def test_priorities_stay_between_the_service_tiers() -> None:
    limits = dataclasses.replace(LIMITS, has_priorities=True)
    for value in (FIRST_PRIORITY + 1, -1, 1, BACKGROUND_PRIORITY - 1):
        check({"priority": value}, limits)
        _check_headers(Headers({"X-Vllm-Priority": str(value)}), has_priorities=True)
    for value in (FIRST_PRIORITY, -(2**31), BACKGROUND_PRIORITY, 2**31, 2**62):
        with pytest.raises(InvalidValueError):
            check({"priority": value}, limits)
        with pytest.raises(InvalidValueError):
            _check_headers(Headers({"X-Vllm-Priority": str(value)}), has_priorities=True)


@pytest.mark.parametrize("value", ["high", "1.5", "", "1_0", "9" * 5000])
def test_a_priority_in_a_header_must_be_a_small_integer(value: str) -> None:
    _check_headers(Headers({"X-Vllm-Priority": "-3"}), has_priorities=True)
    _check_headers(Headers({}), has_priorities=False)
    _check_headers(Headers({"X-Vllm-Priority": "0"}), has_priorities=False)
    with pytest.raises(InvalidValueError) as caught:
        _check_headers(Headers({"X-Vllm-Priority": value}), has_priorities=True)
    assert caught.value.param == "X-Vllm-Priority"
    with pytest.raises(UnsupportedFieldError):
        _check_headers(Headers({"X-Vllm-Priority": "1"}), has_priorities=False)


# -------------------------------------------------------------------------------------- field rules
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
