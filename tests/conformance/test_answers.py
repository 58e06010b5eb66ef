"""Chat completions that are answered in one piece."""

import json
from contextlib import suppress
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.conformance.target import absent, error_of

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
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens > 0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_length_is_kept(client: openai.OpenAI, model: str, name: str) -> None:
    wish: dict[str, Any] = {"max_tokens": openai.NOT_GIVEN, name: 3}
    answer = ask(client, model, **wish, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("wish", [{}, {"temperature": 1, "seed": 7}], ids=["zero", "seed"])
def test_temperature_zero_and_a_seed_repeat_themselves(
    client: openai.OpenAI, model: str, wish: dict[str, Any]
) -> None:
    texts = {ask(client, model, **wish).choices[0].message.content for _ in range(3)}
    assert len(texts) == 1


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
    text = whole[2:4]
    for stop in (text, [text]):
        choice = ask(client, model, max_tokens=16, stop=stop).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.content == whole[: whole.index(text)]


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
    content = ask(client, model, logprobs=True).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in content)


def test_logit_bias_forces_a_token(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, max_tokens=3, logit_bias={"40": 100}, logprobs=True, temperature=0)
    tokens = {token.token for token in answer.choices[0].logprobs.content}
    assert len(tokens) == 1


def test_penalties_nucleus_and_labels_are_taken(client: openai.OpenAI, model: str) -> None:
    ask(client, model, presence_penalty=0.5, frequency_penalty=-0.5, top_p=0.5, temperature=1)
    ask(client, model, user="someone", metadata={"run": "1"})


def test_a_conversation_of_several_turns(client: openai.OpenAI, model: str) -> None:
    turns: list[Any] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [{"type": "text", "text": "Three?"}]},
    ]
    longer = ask(client, model, messages=turns).usage.prompt_tokens
    assert longer > ask(client, model).usage.prompt_tokens


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


# -------------------------------------------------------------------------------------- completions
def complete(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    wish = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **wish}
    return client.completions.create(model=model, **wish)


def test_a_completion_has_the_documented_form(client: openai.OpenAI, model: str) -> None:
    answer = complete(client, model)
    assert answer.object == "text_completion"
    assert isinstance(answer.choices[0].text, str)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_prompts_of_several_forms(client: openai.OpenAI, model: str) -> None:
    answer = complete(client, model, prompt=["a b", "c d e"], n=2, temperature=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert complete(client, model, prompt=[10, 11, 12]).usage.prompt_tokens in (3, 4)
    echoed = complete(client, model, echo=True)
    assert echoed.choices[0].text.startswith("Once upon a time")


def test_logprobs_line_up(client: openai.OpenAI, model: str) -> None:
    logprobs = complete(client, model, logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert len(logprobs.tokens) == len(logprobs.text_offset)
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_a_stream_says_what_the_answer_says_and_usage_last(
    client: openai.OpenAI, model: str
) -> None:
    whole = complete(client, model).choices[0].text
    chunks = list(complete(client, model, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0


def test_a_stop_string_ends_the_answer(client: openai.OpenAI, model: str) -> None:
    whole = complete(client, model, max_tokens=16).choices[0].text
    if len(whole) < 4:
        pytest.skip(f"the model's answer is too short to stop in: {whole!r}")
    choice = complete(client, model, max_tokens=16, stop=whole[2:4]).choices[0]
    assert choice.finish_reason == "stop"
    assert whole[2:4] not in choice.text


async def test_the_async_client_streams(async_client: openai.AsyncOpenAI, model: str) -> None:
    stream = await async_client.completions.create(
        model=model, prompt="a", max_tokens=4, stream=True
    )
    assert [chunk async for chunk in stream]


def test_an_empty_prompt_is_refused_or_answered(client: openai.OpenAI, model: str) -> None:
    with suppress(openai.BadRequestError):
        assert len(complete(client, model, prompt="").choices) == 1


def test_embeddings_of_a_model_that_generates_are_refused_cleanly(
    client: openai.OpenAI, model: str
) -> None:
    try:
        client.embeddings.create(model=model, input="a")
    except openai.APIStatusError as error:
        assert error.status_code < 500


# ------------------------------------------------------------------------------------------- models
def test_the_list_has_the_model(client: openai.OpenAI, model: str) -> None:
    listed = client.models.list()
    assert listed.object == "list"
    assert model in [item.id for item in listed]
    item = next(iter(listed))
    assert (item.object, type(item.created)) == ("model", int)
    assert item.owned_by
    assert client.models.retrieve(model).id == model


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such-model")
    assert caught.value.code == "model_not_found"


async def test_the_async_client_lists_and_retrieves(
    async_client: openai.AsyncOpenAI, model: str
) -> None:
    assert model in [item.id async for item in await async_client.models.list()]
    assert (await async_client.models.retrieve(model)).id == model


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/no-such-route", 404), ("/v1/chat/completions", 405)]
)
def test_an_unknown_route_and_a_wrong_method_have_the_envelope(
    http: httpx.Client, path: str, status: int
) -> None:
    answer = http.get(path)
    assert answer.status_code == status
    error_of(answer)


# ---------------------------------------------------------------------------------------- responses
def respond(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    wish = {"input": "hi", "max_output_tokens": 8, "temperature": 0, **wish}
    try:
        return client.responses.create(model=model, **wish)
    except openai.NotFoundError as error:
        if error.code == "model_not_found":
            raise
        absent("/v1/responses")


def test_a_response_has_the_documented_form(client: openai.OpenAI, model: str) -> None:
    answer = respond(client, model)
    assert answer.object == "response"
    assert answer.status in ("completed", "incomplete")
    assert isinstance(answer.output_text, str)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_instructions_and_turns_are_taken(client: openai.OpenAI, model: str) -> None:
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    longer = respond(client, model, input=turns, instructions="Be short. Be very short.")
    assert longer.usage.input_tokens > respond(client, model).usage.input_tokens


def test_the_stream_helper_accumulates(client: openai.OpenAI, model: str) -> None:
    respond(client, model)
    with client.responses.stream(model=model, input="hi", max_output_tokens=8) as stream:
        events = list(stream)
    (said,) = [event.text for event in events if event.type == "response.output_text.done"]
    # It has a final response for one that was not cut only (openai-python's issue 3538).
    last = [event.snapshot for event in events if event.type == "response.output_text.delta"][-1]
    assert last == said


async def test_the_async_client_answers(async_client: openai.AsyncOpenAI, model: str) -> None:
    try:
        answer = await async_client.responses.create(model=model, input="hi", max_output_tokens=4)
    except openai.NotFoundError:
        absent("/v1/responses")
    assert answer.usage is not None


class Lamp(pydantic.BaseModel):
    lit: bool


def test_the_parse_helper_returns_the_model(client: openai.OpenAI, model: str) -> None:
    respond(client, model)
    for _ in range(6):
        answer = client.responses.parse(
            model=model, input="hi", text_format=Lamp, max_output_tokens=48, temperature=1
        )
        if answer.status == "completed":
            assert isinstance(answer.output_parsed, Lamp)
            return
    pytest.fail("the model never finished a schema of one field")


# ------------------------------------------------------------------------------------------ streams
CHAT = "/v1/chat/completions"


def wish(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": HI, "max_tokens": 8, "temperature": 0, **more}


def test_a_chat_stream_says_what_the_answer_says(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(**wish(model)).choices[0]
    chunks = list(client.chat.completions.create(**wish(model), stream=True))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.finish_reason]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    # Without the option.
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_streamed_completion_comes_last(client: openai.OpenAI, model: str) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(**wish(model), stream=True, stream_options=options)  # type: ignore[call-overload]
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


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
    # Proxies must not buffer it.
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"


def test_a_refusal_comes_before_the_stream(http: httpx.Client, model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "no-such-type"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for wrong in ({"temperature": -1}, {"response_format": form}):
        answer = http.post(CHAT, json=wish(model, stream=True, **wrong))
        assert answer.status_code == 400
        assert answer.headers["content-type"].startswith("application/json")


def test_an_aborted_stream_affects_no_other_request(client: openai.OpenAI, model: str) -> None:
    before = client.chat.completions.create(**wish(model)).choices[0].message.content
    for _ in range(3):
        with client.chat.completions.create(**wish(model, max_tokens=64), stream=True) as stream:
            next(iter(stream))
    assert client.chat.completions.create(**wish(model)).choices[0].message.content == before


async def test_the_async_client_streams_completions(
    async_client: openai.AsyncOpenAI, model: str
) -> None:
    stream = await async_client.chat.completions.create(**wish(model), stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(texts)


def test_the_stream_helper_accumulates_completions(client: openai.OpenAI, model: str) -> None:
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
