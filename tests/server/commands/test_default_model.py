"""The default model behind a real server: the README's requests, its adapter, tools and schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

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
