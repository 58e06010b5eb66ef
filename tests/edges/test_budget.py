"""How large a field may be, by what it holds; refusals name the field, its size and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import ContextLengthError, InvalidValueError, ServerError
from server.request.budget import MAX_FIELDS, Budget, check_budget
from server.wire.endpoint import Endpoint

BUDGET = Budget(
    max_messages=4, max_prompts=3, max_tools=2, max_model_len=100, vocab_size=50, max_text_chars=999
)
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("endpoint", "body", "error", "param", "words"),
    [
        ("CHAT", {"messages": [USER] * 5}, InvalidValueError, "messages", "4 items .*got 5"),
        ("RESPONSES", {"input": [USER] * 5}, InvalidValueError, "input", "4 items .*got 5"),
        ("CHAT", {"messages": [{"content": [{}] * 64}]}, InvalidValueError, "messages", "than 64"),
        ("CHAT", {"messages": [{"content": "x" * 1000}]}, ContextLengthError, "messages", "999"),
        ("CHAT", {"messages": [{"x" * 1000: 1}]}, ContextLengthError, "messages", "1000 char"),
        ("COMPLETION", {"prompt": "x" * 1000}, ContextLengthError, "prompt", "max-text-chars"),
        ("COMPLETION", {"prompt": [5] * 101}, ContextLengthError, "prompt", "101 .* 100 fit"),
        ("COMPLETION", {"prompt": [[5], [5] * 101]}, ContextLengthError, "prompt[1]", "101"),
        ("EMBEDDINGS", {"input": [[5] * 101]}, ContextLengthError, "input[0]", "101"),
        ("EMBEDDINGS", {"input": ["a"] * 8}, InvalidValueError, "input", "7 items .*got 8"),
        ("DETOKENIZE", {"tokens": [5] * 101}, InvalidValueError, "tokens", "100 items .*101"),
        ("CHAT", {"tools": [{}] * 3}, InvalidValueError, "tools", "max-tools.* got 3"),
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
        check_budget(Endpoint[endpoint], body, BUDGET)
    assert type(caught.value) is error
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("CHAT", {"messages": [USER] * 4, "tools": [{}, {}], "n": 3}),
        ("CHAT", {"messages": "x" * 999}),
        ("COMPLETION", {"prompt": [[5] * 100] * 3}),
        ("EMBEDDINGS", {"input": [5] * 400, "truncate_prompt_tokens": 10}),
        ("CHAT", {"logit_bias": {str(i): 1 for i in range(50)}}),
    ],
)
def test_what_is_not_passes(endpoint: str, body: dict[str, Any]) -> None:
    check_budget(Endpoint[endpoint], body, BUDGET)


def test_texts_are_measured_against_the_context_unless_a_flag_says_otherwise() -> None:
    def budget(max_model_len: int) -> Budget:
        return Budget(
            max_messages=4, max_prompts=3, max_tools=2, max_model_len=max_model_len, vocab_size=50
        )

    assert BUDGET.text_chars == 999
    assert budget(100).text_chars == 1 << 20
    assert budget(1 << 20).text_chars == 16 << 20
