"""Chat completions that are answered in one piece."""

from __future__ import annotations

from typing import Any

import openai
import pytest

HI: list[Any] = [{"role": "user", "content": "hi"}]


def ask(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    wish = {"messages": HI, "max_tokens": 8, "temperature": 0, **wish}
    return client.chat.completions.create(model=model, **wish)


def test_an_answer_has_the_documented_form(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model)
    assert answer.object == "chat.completion"
    assert answer.id
    assert answer.created > 1_500_000_000
    assert answer.model == model
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].message.role == "assistant"
    assert isinstance(answer.choices[0].message.content, str)


def test_usage_adds_up(client: openai.OpenAI, model: str) -> None:
    usage = ask(client, model).usage
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_length_is_kept(client: openai.OpenAI, model: str, name: str) -> None:
    wish: dict[str, Any] = {"max_tokens": openai.NOT_GIVEN, name: 3}
    answer = ask(client, model, **wish, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_temperature_zero_repeats_itself(client: openai.OpenAI, model: str) -> None:
    texts = {ask(client, model).choices[0].message.content for _ in range(3)}
    assert len(texts) == 1


def test_a_seed_repeats_itself(client: openai.OpenAI, model: str) -> None:
    texts = [ask(client, model, temperature=1, seed=7).choices[0].message.content for _ in "ab"]
    assert texts[0] == texts[1]


def test_seeds_differ(client: openai.OpenAI, model: str) -> None:
    texts = {
        ask(client, model, temperature=2, seed=seed, max_tokens=12).choices[0].message.content
        for seed in range(5)
    }
    assert len(texts) > 1


def test_n_answers(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, n=3, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens <= 24


def test_a_stop_string_ends_the_answer_and_is_left_out(client: openai.OpenAI, model: str) -> None:
    whole = ask(client, model, max_tokens=16).choices[0].message.content
    if len(whole) < 4:
        pytest.skip(f"the model's answer is too short to stop in: {whole!r}")
    stop = whole[2:4]
    choice = ask(client, model, max_tokens=16, stop=[stop]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == whole[: whole.index(stop)]


def test_stop_may_be_one_string(client: openai.OpenAI, model: str) -> None:
    assert ask(client, model, stop="\u2603").choices[0].message.content is not None


def test_logprobs_describe_each_token(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0
        assert isinstance(token.token, str)
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    # Greedily, the token taken is the most likely one.
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)


def test_logprobs_without_alternatives(client: openai.OpenAI, model: str) -> None:
    content = ask(client, model, logprobs=True).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in content)


def test_logit_bias_forces_a_token(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, max_tokens=3, logit_bias={"40": 100}, logprobs=True, temperature=0)
    tokens = {token.token for token in answer.choices[0].logprobs.content}
    assert len(tokens) == 1


def test_penalties_and_nucleus_are_taken(client: openai.OpenAI, model: str) -> None:
    ask(client, model, presence_penalty=0.5, frequency_penalty=-0.5, top_p=0.5, temperature=1)


def test_a_conversation_of_several_turns(client: openai.OpenAI, model: str) -> None:
    turns: list[Any] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [{"type": "text", "text": "Three?"}]},
    ]
    longer = ask(client, model, messages=turns).usage.prompt_tokens
    assert longer > ask(client, model).usage.prompt_tokens


def test_labels_of_the_client_are_taken(client: openai.OpenAI, model: str) -> None:
    ask(client, model, user="someone", metadata={"run": "1"})


async def test_the_async_client_is_concurrent(async_client: openai.AsyncOpenAI, model: str) -> None:
    import asyncio

    wish: dict[str, Any] = {"model": model, "messages": HI, "max_tokens": 4, "temperature": 0}
    answers = await asyncio.gather(
        *(async_client.chat.completions.create(**wish) for _ in range(6))
    )
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert len({answer.id for answer in answers}) == 6


def test_raw_responses_carry_a_request_id(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=HI, max_tokens=1, extra_headers={"x-request-id": "conformance-1"}
    )
    assert raw.headers["x-request-id"] == "conformance-1"
    assert raw.parse().choices
