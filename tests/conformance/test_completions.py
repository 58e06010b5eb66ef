"""The completions endpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import openai
import pytest


def ask(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    wish = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **wish}
    return client.completions.create(model=model, **wish)


def test_an_answer_has_the_documented_form(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model)
    assert answer.object == "text_completion"
    assert isinstance(answer.choices[0].text, str)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_several_prompts(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, prompt=["a b", "c d e"], n=2, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_prompt_of_token_ids(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, prompt=[10, 11, 12])
    assert answer.usage.prompt_tokens in (3, 4)


def test_the_prompt_is_echoed(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, echo=True)
    assert answer.choices[0].text.startswith("Once upon a time")


def test_logprobs_line_up(client: openai.OpenAI, model: str) -> None:
    logprobs = ask(client, model, logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert len(logprobs.tokens) == len(logprobs.text_offset)
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_a_stream_says_what_the_answer_says(client: openai.OpenAI, model: str) -> None:
    whole = ask(client, model).choices[0].text
    chunks = list(ask(client, model, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole


def test_usage_comes_last_with_the_option(client: openai.OpenAI, model: str) -> None:
    chunks = list(ask(client, model, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0


def test_a_stop_string_ends_the_answer(client: openai.OpenAI, model: str) -> None:
    whole = ask(client, model, max_tokens=16).choices[0].text
    if len(whole) < 4:
        pytest.skip(f"the model's answer is too short to stop in: {whole!r}")
    choice = ask(client, model, max_tokens=16, stop=whole[2:4]).choices[0]
    assert choice.finish_reason == "stop"
    assert whole[2:4] not in choice.text


async def test_the_async_client_streams(async_client: openai.AsyncOpenAI, model: str) -> None:
    stream = await async_client.completions.create(
        model=model, prompt="a", max_tokens=4, stream=True
    )
    assert [chunk async for chunk in stream]


def test_an_empty_prompt_is_refused_or_answered(client: openai.OpenAI, model: str) -> None:
    with suppress(openai.BadRequestError):
        assert len(ask(client, model, prompt="").choices) == 1


def test_embeddings_of_a_model_that_generates_are_refused_cleanly(
    client: openai.OpenAI, model: str
) -> None:
    try:
        client.embeddings.create(model=model, input="a")
    except openai.APIStatusError as error:
        assert error.status_code < 500
