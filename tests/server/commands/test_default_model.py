"""The default model behind a real server: the README's requests, its adapter, tools and schemas."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from pydantic_core import from_json
from vllm.entrypoints.cli import main as vllm_cli

from default_model.paths import CHECKPOINT
from server.tools import is_whole
from tests.default_model_answers import CALL, CHAT, EXTRACTION, SCHEMA
from tests.server.cut_answers import Answer, Asker
from tests.server.real_server import RealServer
from tests.warm_process import warm_process

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


_VLLM = Path(vllm_cli.__file__)


def test_vllm_chat_prints_the_same_answer(client: openai.OpenAI) -> None:
    pinned = CHAT[0]
    (message,) = pinned.messages
    words = ["--url", str(client.base_url), "--model-name", "default-model"]
    done = warm_process().run(
        "chat", *words, "-q", str(message["content"]), environ=os.environ, script=_VLLM
    )
    assert done.stdout.strip().endswith(pinned.answer), done.stderr


def test_vllm_bench_measures_it(client: openai.OpenAI, tmp_path: Path) -> None:
    words = ["--base-url", str(client.base_url).removesuffix("/v1/"), "--num-prompts", "2"]
    words += ["--random-input-len", "16", "--random-output-len", "4", "--save-result"]
    words += ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
    done = warm_process().run("bench", "serve", *words, environ=os.environ, script=_VLLM)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (2, 8)


def test_greedy_answers_and_the_adapter_s(client: openai.OpenAI) -> None:
    for pinned in (*CHAT, EXTRACTION):
        given = _ask(client, "default-model", pinned.messages).content
        assert given == pinned.answer
        if pinned.adapted:
            assert _ask(client, "pirate", pinned.messages).content == pinned.adapted


@pytest.mark.parametrize("words", [["Paris"], ["Paris", " Paris"], [" Paris"]])
def test_banned_words_do_not_appear(client: openai.OpenAI, words: list[str]) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in _ask(client, "default-model", question).content
    banned = _ask(client, "default-model", question, extra_body={"bad_words": words}).content
    assert not any(word in banned for word in words)


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
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Seoul?"}]


def chat_call(client: openai.OpenAI, forced: bool, strict: bool, stream: bool) -> Any:
    tool: Any = {"name": "get_weather", "parameters": WEATHER, "strict": strict}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    wish: Any = {
        "model": "default-model",
        "messages": QUESTION,
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
        "input": QUESTION,
        "tools": [{**named, "parameters": WEATHER, "strict": strict}],
        "tool_choice": named if forced else "required",
        "temperature": 0,
        "store": False,
    }
    if not stream:
        (call,) = client.responses.create(**wish).output
        return json.loads(call.arguments)
    events = client.responses.create(**wish, stream=True)
    (found,) = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    return json.loads(found)


def message_call(client: openai.OpenAI, forced: bool, strict: bool, stream: bool) -> Any:
    url = str(client.base_url).removesuffix("/v1/")
    wish: Any = {
        "model": "default-model",
        "messages": QUESTION,
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


LOOK: dict[str, Any] = {"name": "get_weather", "parameters": WEATHER}
TEXT_AND_CALLS = (
    'I look.\n<tool_call>{"name": "get_weather", "arguments": {"city": "Ulm", "unit": "kelvin"}}'
    '</tool_call>\n<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'
)


def same(whole: Answer, streamed: Answer) -> bool:
    """Compare two answers; a whole message has its partial input parsed."""
    if not whole.calls or not isinstance(whole.calls[-1][1], dict):
        return whole == streamed
    calls = [(name, from_json(text, allow_partial=True)) for name, text in streamed.calls]
    return whole == replace(streamed, calls=calls, complete=list(map(from_json, streamed.complete)))


MOST = 150
"""Tokens of an answer: the calls' special tokens are spelled, the prompt is part of 256."""


def every_limit(ask: Any, *args: Any, step: int = 1, **more: Any) -> tuple[Answer, list[Answer]]:
    """Return the full answer, and those of smaller limits, requested in both ways."""
    full, cut = ask(MOST, True, *args, **more), list[Answer]()
    assert full.ended == "calls"
    assert full.complete == [arguments for _, arguments in full.calls]
    for limit in range(1, MOST, step):
        streamed = ask(limit, True, *args, **more)
        if streamed.ended != "length":
            assert streamed == full
            break
        cut.append(streamed)
        assert full.text.startswith(streamed.text.rstrip())
        for (name, text), (full_name, full_text) in zip(streamed.calls, full.calls, strict=False):
            assert name == full_name
            assert full_text.startswith(text)
            assert text.startswith("{")
        assert all(is_whole(text) for text in streamed.complete)
        assert same(ask(limit, False, *args, **more), streamed)
    assert len(cut) * step > 12
    assert any(not is_whole(text) for one in cut for _, text in one.calls)
    assert not cut[0].calls
    assert same(ask(MOST, False, *args, **more), full)
    return full, cut


WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("api", "choice", "step"),
    [
        ("chat", "auto", 3),
        ("chat", "named", 3),
        ("response", "required", 3),
        ("message", "auto", 3),
        *(
            pytest.param(api, choice, 1, marks=WIDE)
            for api in ("chat", "response", "message")
            for choice in ("auto", "required", "named")
        ),
    ],
)
def test_a_call_that_a_limit_cuts_is_not_complete(
    client: openai.OpenAI, api: str, choice: str, step: int
) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    asker = Asker(url, "default-model", CALL.question, [LOOK])
    full, _ = every_limit(getattr(asker, api), choice, step=step)
    assert not full.text
    assert len(full.calls) == 1


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=WIDE)])
@pytest.mark.parametrize("api", ["chat", "response"])
def test_text_and_two_calls_are_cut_where_the_limit_is(
    client: openai.OpenAI, api: str, step: int
) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    asker = Asker(url, "default-model", CALL.question, [LOOK])
    guided: dict[str, Any] = {"structured_outputs": {"choice": [TEXT_AND_CALLS]}}
    full, cut = every_limit(getattr(asker, api), "auto", step=step, **guided)
    assert full.text == "I look."
    assert [json.loads(text)["city"] for _, text in full.calls] == ["Ulm", "Bonn"]
    assert {len(one.calls) for one in cut} == {0, 1, 2}
    # A stop string cuts as a limit does, and is no reason to call.
    guided["stop"] = "Bo"
    stopped = getattr(asker, api)(MOST, True, "auto", **guided)
    assert stopped.calls[1][1].startswith("{")
    assert not is_whole(stopped.calls[1][1])
    assert len(stopped.complete) < 2
    assert stopped == getattr(asker, api)(MOST, False, "auto", **guided)


RING: dict[str, Any] = {"name": "ring", "parameters": {"type": "object", "properties": {}}}


def called(client: openai.OpenAI, api: str, choice: Any, stream: bool, **more: Any) -> list[str]:
    """Return the names of the tools that an answer calls, of two that are offered."""
    wish: Any = {"model": "default-model", "temperature": 0, "extra_body": more}
    if api == "response":
        tools: Any = [{"type": "function", "strict": False, **tool} for tool in (LOOK, RING)]
        wish |= {"input": CALL.question, "tools": tools, "max_output_tokens": 96, "store": False}
        if not stream:
            answer = client.responses.create(**wish, tool_choice=choice)
            found = answer.tool_choice
            assert (found if isinstance(found, str) else found.to_dict()) == choice
        else:
            events = list(client.responses.create(**wish, tool_choice=choice, stream=True))
            answer = events[-1].response  # type: ignore[union-attr]
        return [item.name for item in answer.output if item.type == "function_call"]
    tools = [{"type": "function", "function": tool} for tool in (LOOK, RING)]
    wish |= {"messages": CALL.messages, "tools": tools, "max_tokens": 96}
    if not stream:
        message = client.chat.completions.create(**wish, tool_choice=choice).choices[0].message
        return [call.function.name for call in message.tool_calls or []]
    chunks = client.chat.completions.create(**wish, tool_choice=choice, stream=True)
    pieces = [piece for c in chunks for piece in c.choices[0].delta.tool_calls or []]
    return [piece.function.name for piece in pieces if piece.function.name]


def allowed(api: str, mode: str, *names: str) -> Any:
    if api == "response":
        tools: Any = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "response"])
def test_only_allowed_tools_are_called(client: openai.OpenAI, api: str, stream: bool) -> None:
    # The question asks for the weather, and the model would call that tool.
    assert called(client, api, allowed(api, "auto", "get_weather"), stream) == ["get_weather"]
    assert set(called(client, api, allowed(api, "required", "ring"), stream)) == {"ring"}
    assert "get_weather" not in called(client, api, allowed(api, "auto", "ring"), stream)
    with pytest.raises(openai.BadRequestError, match="got 'bell'") as caught:
        called(client, api, allowed(api, "auto", "ring", "bell"), stream)
    place = "tools[1].name" if api == "response" else "allowed_tools.tools[1].function.name"
    assert caught.value.param == f"tool_choice.{place}"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "response"])
def test_calls_that_may_not_be_parallel_are_one(
    client: openai.OpenAI, api: str, stream: bool
) -> None:
    guided: Any = {"structured_outputs": {"choice": [TEXT_AND_CALLS]}}
    choice = "auto"
    assert len(called(client, api, choice, stream, **guided)) == 2
    guided["parallel_tool_calls"] = False
    assert len(called(client, api, choice, stream, **guided)) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_messages_name_tools_and_call_one(client: openai.OpenAI, stream: bool) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    tools: Any = [{"name": t["name"], "input_schema": t["parameters"]} for t in (LOOK, RING)]
    wish: Any = {
        "model": "default-model",
        "messages": CALL.messages,
        "tools": tools,
        "max_tokens": 96,
        "extra_body": {"temperature": 0, "stream": stream},
    }
    with anthropic.Anthropic(base_url=url, api_key="none") as messages:
        for choice in (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "ring", "disable_parallel_tool_use": True},
        ):
            answer = messages.messages.with_raw_response.create(**wish, tool_choice=choice)
            assert answer.text().count('tool_use","id') == 1
        with pytest.raises(anthropic.BadRequestError, match="got 'bell'"):
            messages.messages.create(**wish, tool_choice={"type": "tool", "name": "bell"})
