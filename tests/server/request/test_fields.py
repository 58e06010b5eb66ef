"""Which fields are taken, what a request may ask for, and how pydantic's complaints read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import Headers

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
from server.frontend import Endpoint
from server.request.fields import accepted_fields, check_nested
from server.request.limits import Limits, check_limits, check_priority_header

KNOWN = ("messages", "temperature", "stream", "stream_options", "tools", "length_penalty")
LIMITS = Limits(
    max_n=4,
    max_messages=2,
    max_prompts=3,
    max_stop=2,
    max_logit_bias=3,
    max_model_len=100,
    vocab_size=50,
    max_queued_tokens=150,
    has_priorities=False,
)
MESSAGE = {"role": "user", "content": "hi"}


def accept(**body: Any) -> dict[str, Any]:
    return accepted_fields(body, KNOWN, "reject", Endpoint.CHAT)


def test_known_fields_pass_unchanged() -> None:
    assert accept(temperature=1, tools=[]) == {"temperature": 1, "tools": []}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temprature", 1, "did you mean 'temperature'?"),
        ("verbosit", 1, "did you mean 'verbosity'?"),
        ("xyz", None, "Unknown field 'xyz' (with --unknown-fields warn"),
        ("guided_json", {}, "json_schema"),
        ("guided_regex", "a", "structured_outputs.regex"),
        ("guided_choice", [], "structured_outputs.choice"),
        ("guided_grammar", "", "structured_outputs.grammar"),
        ("guided_decoding_backend", "x", "--structured-outputs-config"),
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
    assert accepted_fields({"xyz": 1, "stream": True}, KNOWN, "warn", Endpoint.CHAT) == {
        "stream": True
    }


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


class Inner(BaseModel):
    model_config = ConfigDict(extra="allow")
    size: int = 0


class Outer(BaseModel):
    inner: Inner | None = None
    items: list[Inner] = []
    free: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"inner": {"size": 1, "colour": 2}}, "inner.colour"),
        ({"items": [{"size": 1}, {"siz": 1}]}, "items[1].siz"),
    ],
)
def test_unknown_nested_fields_are_refused_with_their_path(
    body: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnknownFieldError) as caught:
        check_nested(Outer.model_validate(body), body, "reject")
    assert caught.value.param == param


def test_free_form_mappings_are_not_entered() -> None:
    body = {"free": {"anything": {"goes": 1}}, "items": [{"size": 3}], "inner": None}
    check_nested(Outer.model_validate(body), body, "reject")


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
        ({"messages": [MESSAGE] * 3}, InvalidValueError, "messages"),
        ({"messages": [MESSAGE, {"content": "x"}]}, MissingFieldError, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, MissingFieldError, "messages[0].content"),
        ({"prompt": ""}, InvalidValueError, "prompt"),
        ({"prompt": []}, InvalidValueError, "prompt"),
        ({"prompt": [[]]}, InvalidValueError, "prompt"),
        ({"prompt": ["a"] * 4}, InvalidValueError, "prompt"),
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
        check_limits(body, LIMITS)
    assert caught.value.param == param


def test_what_is_within_the_limits_passes() -> None:
    turns = [MESSAGE, {"role": "assistant", "tool_calls": []}]
    check_limits({"messages": turns, "n": 4, "priority": 0, "max_tokens": 100}, LIMITS)
    check_limits({"prompt": ["a"] * 3}, LIMITS)
    check_limits({"prompt": [49] * 90}, LIMITS)
    check_limits({"messages": "wrong type", "n": "two", "tools": [7, {"function": 7}]}, LIMITS)
    check_limits({"tools": [{"parameters": {"type": ["object", "null"]}}, {"name": "a"}]}, LIMITS)


def test_limits_are_named_with_their_numbers() -> None:
    with pytest.raises(InvalidValueError, match=r"'stop' must have at most 2 items .* got 3"):
        check_limits({"stop": ["a", "b", "c"]}, LIMITS)
    check_limits({"stop": ["a", "b"], "logit_bias": {"1": 1, "2": 1, "3": 1}}, LIMITS)


@pytest.mark.parametrize("value", ["high", "1.5", "", "9" * 5000])
def test_a_priority_in_a_header_must_be_a_small_integer(value: str) -> None:
    limits = dataclasses.replace(LIMITS, has_priorities=True)
    check_priority_header(Headers({"X-Vllm-Priority": "-3"}), limits)
    check_priority_header(Headers({}), LIMITS)
    check_priority_header(Headers({"X-Vllm-Priority": "0"}), LIMITS)
    with pytest.raises(InvalidValueError) as caught:
        check_priority_header(Headers({"X-Vllm-Priority": value}), limits)
    assert caught.value.param == "X-Vllm-Priority"
    with pytest.raises(UnsupportedFieldError):
        check_priority_header(Headers({"X-Vllm-Priority": "1"}), LIMITS)
