"""The Responses API, as far as it needs no store; what does is in `test_stored`."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from tests.conformance.target import absent


def ask(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    wish = {"input": "hi", "max_output_tokens": 8, "temperature": 0, **wish}
    try:
        return client.responses.create(model=model, **wish)
    except openai.NotFoundError as error:
        if error.code == "model_not_found":
            raise
        absent("/v1/responses")


def test_an_answer_has_the_documented_form(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model)
    assert answer.object == "response"
    assert answer.status in ("completed", "incomplete")
    assert isinstance(answer.output_text, str)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_an_answer_that_was_cut_says_why(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, model, max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_instructions_and_turns_are_taken(client: openai.OpenAI, model: str) -> None:
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    longer = ask(client, model, input=turns, instructions="Be short. Be very short.")
    assert longer.usage.input_tokens > ask(client, model).usage.input_tokens


def test_events_come_in_order(client: openai.OpenAI, model: str) -> None:
    events = list(ask(client, model, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    # A client that looks at the event alone has to see that the answer was cut.
    assert kinds[-1] == f"response.{events[-1].response.status}"
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(numbers)
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == events[-1].response.output_text


def test_the_stream_helper_accumulates(client: openai.OpenAI, model: str) -> None:
    ask(client, model)
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
    ask(client, model)
    for _ in range(6):
        answer = client.responses.parse(
            model=model, input="hi", text_format=Lamp, max_output_tokens=48, temperature=1
        )
        if answer.status == "completed":
            assert isinstance(answer.output_parsed, Lamp)
            return
    pytest.fail("the model never finished a schema of one field")


def test_what_needs_a_store_is_refused(client: openai.OpenAI, model: str) -> None:
    ask(client, model)
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model=model, input="hi", previous_response_id="resp_nowhere")
    assert 400 <= caught.value.status_code < 500
