"""How large a field may be, by what it holds; refusals name the field, its size and the limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from server.errors import ContextLengthError, InvalidValueError, ServerError
from server.request.sizes import MAX_FIELDS, check_sizes
from server.wire import Endpoint
from tests.server.request.limits import LIMITS

USER = {"role": "user", "content": "hi"}
LONG = "x" * ((1 << 20) + 1)


@pytest.mark.parametrize(
    ("endpoint", "body", "error", "param", "words"),
    [
        ("CHAT", {"messages": [USER] * 5}, InvalidValueError, "messages", "4 items .*got 5"),
        ("RESPONSES", {"input": [USER] * 5}, InvalidValueError, "input", "4 items .*got 5"),
        ("CHAT", {"messages": [{"content": [{}] * 64}]}, InvalidValueError, "messages", "than 64"),
        (
            "CHAT",
            {"messages": [{"content": LONG}]},
            ContextLengthError,
            "messages",
            str(1 << 20),
        ),
        (
            "CHAT",
            {"messages": [{LONG: 1}]},
            ContextLengthError,
            "messages",
            "1048577 char",
        ),
        (
            "COMPLETION",
            {"prompt": LONG},
            ContextLengthError,
            "prompt",
            str(1 << 20),
        ),
        ("COMPLETION", {"prompt": [5] * 101}, ContextLengthError, "prompt", "101 .* 100 fit"),
        ("COMPLETION", {"prompt": [[5], [5] * 101]}, ContextLengthError, "prompt[1]", "101"),
        ("EMBEDDINGS", {"input": [[5] * 101]}, ContextLengthError, "input[0]", "101"),
        ("COMPLETION", {"prompt": [[5]] * 4}, InvalidValueError, "prompt", "3 items .*got 4"),
        ("COMPLETION", {"prompt": [5, {"a": [1] * 512}]}, InvalidValueError, "prompt", "than 112"),
        ("COMPLETION", {"prompt": [[5, {"a": [1] * 512}]]}, InvalidValueError, "prompt", "than"),
        ("EMBEDDINGS", {"input": [5, LONG]}, ContextLengthError, "input", "1048577 char"),
        ("EMBEDDINGS", {"input": ["a"] * 4}, InvalidValueError, "input", "3 items .*got 4"),
        ("EMBEDDINGS", {"input": [USER] * 5}, InvalidValueError, "input", "4 items .*got 5"),
        ("EMBEDDINGS", {"messages": [[USER]] * 4}, InvalidValueError, "messages", "got 4"),
        ("RERANK", {"documents": ["b"] * 4}, InvalidValueError, "documents", "got 4"),
        ("COHERE_EMBED", {"texts": ["b"] * 4}, InvalidValueError, "texts", "got 4"),
        ("COHERE_EMBED", {"inputs": [{"content": []}] * 4}, InvalidValueError, "inputs", "got 4"),
        ("DETOKENIZE", {"tokens": [5] * 101}, InvalidValueError, "tokens", "100 items .*101"),
        ("CHAT", {"tools": [{}] * 3}, InvalidValueError, "tools", "2 items .* got 3"),
        ("CHAT", {"tools": [{"a": [1] * 512}]}, InvalidValueError, "tools", "than 512"),
        ("CHAT", {"allowed_token_ids": [1] * 51}, InvalidValueError, "allowed_token_ids", "50"),
        ("CHAT", {"bad_words": ["a"] * 257}, InvalidValueError, "bad_words", "256 items"),
        ("CHAT", {"stop": "a" * 1025}, InvalidValueError, "stop", "1024"),
        ("CHAT", {"user": "a" * 1025}, InvalidValueError, "user", "1025 characters"),
        ("CHAT", {"metadata": {"a": "b" * 70000}}, InvalidValueError, "metadata", "65536"),
        ("CHAT", {"unheard_of": [1] * 2000}, InvalidValueError, "unheard_of", "1024 items"),
        ("RESPONSES", {"prompt": {"a": [1] * 2000}}, InvalidValueError, "prompt", "than 1024"),
        ("CHAT", {str(i): 1 for i in range(MAX_FIELDS + 1)}, InvalidValueError, None, "257"),
    ],
)
def test_what_is_too_large_is_refused(
    endpoint: str, body: dict[str, Any], error: type[ServerError], param: str | None, words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        check_sizes(Endpoint[endpoint], body, LIMITS)
    assert type(caught.value) is error
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("CHAT", {"messages": [USER] * 4, "tools": [{}, {}], "n": 3}),
        ("CHAT", {"messages": "x" * (1 << 20)}),
        ("COMPLETION", {"prompt": [[5] * 100] * 3}),
        ("EMBEDDINGS", {"input": [5] * 400, "truncate_prompt_tokens": 10}),
        ("CHAT", {"logit_bias": {str(i): 1 for i in range(50)}}),
    ],
)
def test_what_is_not_passes(endpoint: str, body: dict[str, Any]) -> None:
    check_sizes(Endpoint[endpoint], body, LIMITS)


def test_texts_are_measured_against_the_context() -> None:
    for context, chars in ((100, 1 << 20), (1 << 20, 16 << 20)):
        limits = replace(LIMITS, max_model_len=context)
        assert limits.text_chars == chars
