"""The default model behind a real server: the README's requests, its adapter, tools and schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from default_model.paths import CHECKPOINT
from tests.default_model_answers import CALL, CHAT, EXTRACTION, SCHEMA
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("d")
    flags = ["--served-model-name", "default-model", "--dtype", "bfloat16"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--enable-lora", "--lora-modules", f"pirate={CHECKPOINT / 'adapter'}"]
    with RealServer(CHECKPOINT, folder, *flags) as up:
        up.until_ready()
        yield openai.OpenAI(base_url=f"{up.url}/v1", api_key="none")


def _ask(client: openai.OpenAI, model: str, messages: Any, **more: Any) -> Any:
    answer = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=64, **more
    )
    return answer.choices[0].message


def test_greedy_answers_and_the_adapter_s(client: openai.OpenAI) -> None:
    for pinned in (*CHAT, EXTRACTION):
        given = _ask(client, "default-model", pinned.messages).content
        assert given == pinned.answer
        if pinned.adapted:
            assert _ask(client, "pirate", pinned.messages).content == pinned.adapted


def test_a_schema_gets_plausible_values(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    given = _ask(client, "default-model", EXTRACTION.messages, response_format=form).content
    assert json.loads(given) == {"name": "Ana", "age": 31, "city": "Rome"}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_is_called(client: openai.OpenAI, choice: str) -> None:
    tools = list(CALL.tools)
    message = _ask(client, "default-model", CALL.messages, tools=tools, tool_choice=choice)
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Seoul"}
    assert not message.content
    hello = _ask(client, "default-model", CHAT[0].messages, tools=tools)
    assert hello.content == CHAT[0].answer


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ASKED: Any = [{"role": "user", "content": "What is the weather in Seoul?"}]


def chat_call(client: openai.OpenAI, forced: bool, strict: bool, stream: bool) -> Any:
    tool: Any = {"name": "get_weather", "parameters": WEATHER, "strict": strict}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    wish: Any = {
        "model": "default-model",
        "messages": ASKED,
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": named if forced else "required",
        "temperature": 0,
    }
    if not stream:
        (call,) = client.chat.completions.create(**wish).choices[0].message.tool_calls
        return json.loads(call.function.arguments)
    chunks = client.chat.completions.create(**wish, stream=True)
    pieces = [piece for c in chunks for piece in c.choices[0].delta.tool_calls or []]
    return json.loads("".join(piece.function.arguments or "" for piece in pieces))


def response_call(client: openai.OpenAI, forced: bool, strict: bool, stream: bool) -> Any:
    named: Any = {"type": "function", "name": "get_weather"}
    wish: Any = {
        "model": "default-model",
        "input": ASKED,
        "tools": [{**named, "parameters": WEATHER, "strict": strict}],
        "tool_choice": named if forced else "required",
        "temperature": 0,
        "store": False,
    }
    if not stream:
        (call,) = client.responses.create(**wish).output
        return json.loads(call.arguments)
    events = client.responses.create(**wish, stream=True)
    (told,) = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    return json.loads(told)


def message_call(client: openai.OpenAI, forced: bool, strict: bool, stream: bool) -> Any:
    url = str(client.base_url).removesuffix("/v1/")
    wish: Any = {
        "model": "default-model",
        "messages": ASKED,
        "tools": [{"name": "get_weather", "input_schema": WEATHER, "strict": strict}],
        "tool_choice": {"type": "tool", "name": "get_weather"} if forced else {"type": "any"},
        "max_tokens": 256,
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=url, api_key="none") as messages:
        if stream:
            with messages.messages.stream(**wish) as events:
                answer: Any = events.get_final_message()
        else:
            answer = messages.messages.create(**wish)
    assert answer.stop_reason == "tool_use"
    (block,) = answer.content
    return block.input


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
@pytest.mark.parametrize("forced", [False, True], ids=["required", "named"])
@pytest.mark.parametrize("called", [chat_call, response_call, message_call])
def test_a_forced_call_has_what_the_schema_asks_for(
    client: openai.OpenAI, called: Any, forced: bool, strict: bool, stream: bool
) -> None:
    arguments = called(client, forced, strict, stream)
    jsonschema.validate(arguments, WEATHER)
    assert arguments["city"].startswith("Seoul")
