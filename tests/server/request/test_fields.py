"""Which fields are taken, what a request may ask for, and how pydantic's complaints read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
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
from server.request.options import Tier, check_priority_header, check_tier
from server.request.rules import accepted_fields
from server.request.sizes import RequestLimits
from server.request.values import check_values
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


def test_a_tier_with_a_priority_of_its_own_has_no_other() -> None:
    headers = Headers({"X-Vllm-Priority": "-3"})
    for tier in (None, Tier.DEFAULT):
        check_tier({"priority": 5}, headers, tier)
    for tier in (Tier.FLEX, Tier.PRIORITY):
        check_tier({"priority": 0}, Headers({}), tier)
        with pytest.raises(UnsupportedFieldError, match=f"service tier '{tier.value}'") as caught:
            check_tier({"priority": 5}, Headers({}), tier)
        assert caught.value.param == "priority"
        with pytest.raises(UnsupportedFieldError) as caught:
            check_tier({}, headers, tier)
        assert caught.value.param == "X-Vllm-Priority"


def test_priorities_stay_between_the_service_tiers() -> None:
    limits = dataclasses.replace(LIMITS, has_priorities=True)
    for value in (FIRST_PRIORITY + 1, -1, 1, BACKGROUND_PRIORITY - 1):
        check({"priority": value}, limits)
        check_priority_header(Headers({"X-Vllm-Priority": str(value)}), has_priorities=True)
    for value in (FIRST_PRIORITY, -(2**31), BACKGROUND_PRIORITY, 2**31, 2**62):
        with pytest.raises(InvalidValueError):
            check({"priority": value}, limits)
        with pytest.raises(InvalidValueError):
            check_priority_header(Headers({"X-Vllm-Priority": str(value)}), has_priorities=True)


@pytest.mark.parametrize("value", ["high", "1.5", "", "1_0", "9" * 5000])
def test_a_priority_in_a_header_must_be_a_small_integer(value: str) -> None:
    check_priority_header(Headers({"X-Vllm-Priority": "-3"}), has_priorities=True)
    check_priority_header(Headers({}), has_priorities=False)
    check_priority_header(Headers({"X-Vllm-Priority": "0"}), has_priorities=False)
    with pytest.raises(InvalidValueError) as caught:
        check_priority_header(Headers({"X-Vllm-Priority": value}), has_priorities=True)
    assert caught.value.param == "X-Vllm-Priority"
    with pytest.raises(UnsupportedFieldError):
        check_priority_header(Headers({"X-Vllm-Priority": "1"}), has_priorities=False)
