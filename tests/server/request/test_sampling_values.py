"""Sampling parameters beyond their limits: errors name the field that was sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from server.errors import InvalidValueError
from server.request.values import check_values
from server.wire.endpoint import Endpoint
from tests.server.request.limits import LIMITS

Fields = dict[str, Any]
PATTERN = "repetition_detection"


def check(fields: Fields, *, max_logprobs: int = 20, **defaults: Any) -> None:
    limits = replace(LIMITS, max_logprobs=max_logprobs)
    check_values(Endpoint.CHAT, fields, limits, defaults)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"top_logprobs": 21}, "top_logprobs", "0 to 20 on this server (--max-logprobs), got 21"),
        ({"top_logprobs": -1}, "top_logprobs", "0 to 20 on this server (--max-logprobs), got -1"),
        ({"logprobs": 2**70}, "logprobs", f"got {2**70}"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_completion_tokens": -3}, "max_completion_tokens", "at least 1, got -3"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1, got 0"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "at least 0, got -1"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens", "'max_output_tokens', 2, got 3"),
        (
            {"max_tokens": 9, "max_completion_tokens": 2, "min_tokens": 3},
            "min_tokens",
            "at most 'max_completion_tokens', 2, got 3",
        ),
        ({"temperature": 0, "n": 2}, "n", "be 1 at a 'temperature' of 0, got 2"),
        ({"stop": ["a", ""]}, "stop[1]", "must not be empty"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"bad_words": [""]}, "bad_words[0]", "must not be empty"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
        ({PATTERN: {"max_pattern_size": -1}}, f"{PATTERN}.max_pattern_size", "at least 0, got -1"),
        (
            {PATTERN: {"max_pattern_size": 2, "min_pattern_size": 5}},
            f"{PATTERN}.min_pattern_size",
            "0 to 'max_pattern_size', 2, got 5",
        ),
        (
            {PATTERN: {"max_pattern_size": 2, "min_count": 1}},
            f"{PATTERN}.min_count",
            "at least 2, got 1",
        ),
    ],
)
def test_an_error_names_field_value_and_limit(fields: Fields, param: str, text: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        check(fields)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message
    assert text in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 0},
        {"max_tokens": 0, "echo": True, "min_tokens": 0},
        {"max_tokens": 3, "min_tokens": 3, "n": 2, "temperature": 0.7},
        {"n": 2, "temperature": 0, "use_beam_search": True},
        {"n": "2", "max_tokens": "5", "top_logprobs": [], "stop": 5, PATTERN: [1]},
        {PATTERN: {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}},
    ],
)
def test_other_values_pass(fields: Fields) -> None:
    check(fields)


def test_all_logprobs_where_the_server_has_no_limit() -> None:
    check({"top_logprobs": -1, "logprobs": LIMITS.vocab_size}, max_logprobs=-1)
    with pytest.raises(InvalidValueError, match="be -1 to 50 on this server"):
        check({"top_logprobs": 51}, max_logprobs=-1)


def test_the_model_s_own_temperature_counts() -> None:
    with pytest.raises(InvalidValueError, match=r"'n' must be 1 at a 'temperature' of 0\.0, got 2"):
        check({"n": 2}, temperature=0.0)
    check({"n": 2, "temperature": 1.0}, temperature=0.0)
