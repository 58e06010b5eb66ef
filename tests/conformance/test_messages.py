"""Anthropic's Messages API, with its own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
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


def test_tokens_are_counted(messages: anthropic.Anthropic, model: str) -> None:
    assert messages.messages.count_tokens(model=model, messages=HI).input_tokens > 0


def test_an_unknown_model_is_not_found(messages: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        messages.messages.create(model="no-such-model", messages=HI, max_tokens=1)


def test_a_wrong_value_is_a_400(messages: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError):
        messages.messages.create(model=model, messages=HI, max_tokens=-1)
