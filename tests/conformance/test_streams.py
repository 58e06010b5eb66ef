"""Server-sent events: what is in a stream, how it ends, what happens when it is left."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]


def wish(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": HI, "max_tokens": 8, "temperature": 0, **more}


def test_a_chat_stream_says_what_the_answer_says(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(**wish(model)).choices[0]
    chunks = list(client.chat.completions.create(**wish(model), stream=True))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.finish_reason]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_first_chunk_names_the_role(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.create(**wish(model), stream=True) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"


def test_usage_comes_last_with_the_option(client: openai.OpenAI, model: str) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(**wish(model), stream=True, stream_options=options)  # type: ignore[call-overload]
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_no_usage_without_the_option(client: openai.OpenAI, model: str) -> None:
    chunks = list(client.chat.completions.create(**wish(model), stream=True))
    assert all(chunk.usage is None for chunk in chunks)


def test_several_answers_have_their_indices(client: openai.OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(**wish(model, n=2, temperature=1), stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_logprobs_are_streamed(client: openai.OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(
        **wish(model, logprobs=True, top_logprobs=1), stream=True
    )
    logprobs = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert sum(len(item.content or []) for item in logprobs) == 8


def test_headers_and_the_end_of_a_stream(http: httpx.Client, model: str) -> None:
    answer = http.post(CHAT, json=wish(model, stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    for frame in answer.text.split("\n\n"):
        assert frame == "" or frame.startswith(("data: ", ":"))


def test_headers_disable_buffering_by_proxies(http: httpx.Client, model: str) -> None:
    headers = http.post(CHAT, json=wish(model, stream=True)).headers
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


def test_a_refusal_comes_before_the_stream(http: httpx.Client, model: str) -> None:
    answer = http.post(CHAT, json=wish(model, stream=True, temperature=-1))
    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("application/json")


def test_a_bad_schema_is_refused_before_the_stream(http: httpx.Client, model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "no-such-type"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = http.post(CHAT, json=wish(model, stream=True, response_format=form))
    assert answer.status_code == 400


def test_an_aborted_stream_affects_no_other_request(client: openai.OpenAI, model: str) -> None:
    before = client.chat.completions.create(**wish(model)).choices[0].message.content
    for _ in range(3):
        with client.chat.completions.create(**wish(model, max_tokens=64), stream=True) as stream:
            next(iter(stream))
    assert client.chat.completions.create(**wish(model)).choices[0].message.content == before


async def test_the_async_client_streams(async_client: openai.AsyncOpenAI, model: str) -> None:
    stream = await async_client.chat.completions.create(**wish(model), stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(texts)


def test_the_stream_helper_accumulates(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(**wish(model, max_tokens=16)).choices[0].message.content
    # The helper raises for an answer that was cut off.
    ending = wish(model, max_tokens=64, stop=str(whole)[2:4] or None)
    with client.chat.completions.stream(**ending) as stream:
        try:
            texts = [event.delta for event in stream if event.type == "content.delta"]
        except openai.LengthFinishReasonError:
            pytest.skip(f"the model's answer does not end: {whole!r}")
        assert stream.get_final_completion().choices[0].message.content == "".join(texts)


@pytest.mark.parametrize("options", [{"include_usage": True}, {}])
def test_every_frame_is_json(http: httpx.Client, model: str, options: dict[str, bool]) -> None:
    answer = http.post(CHAT, json=wish(model, stream=True, stream_options=options))
    frames = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    assert all(json.loads(frame)["model"] == model for frame in frames)
