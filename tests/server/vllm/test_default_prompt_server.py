"""A real server whose model's chat template shows no tools: each API shows them all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from default_model.paths import CHECKPOINT
from tests.server.real_server import RealServer
from tests.server.vllm.test_default_prompt import SMOLLM2

pytestmark = pytest.mark.engine

MODEL = "tiny"
QUESTION = "What is the weather in Ulm?"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
    "required": ["city"],
}
FUNCTION: dict[str, Any] = {"name": "look", "parameters": PARAMETERS}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": False, **FUNCTION}]
MESSAGE_TOOLS: list[Any] = [{"name": "look", "input_schema": PARAMETERS}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Ulm"}}\n</tool_call>'
RESULT = "<tool_response>\n21 C\n</tool_response>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("d")
    template = folder / "template.jinja"
    template.write_text(SMOLLM2, encoding="utf-8")
    flags = ("--chat-template", str(template), "--max-model-len", "1024", "--dtype", "bfloat16")
    with RealServer(CHECKPOINT, folder, *flags) as up:
        up.until_ready()
        yield up


@pytest.fixture(scope="module")
def messages(server: RealServer) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none").messages


def prompt_of(server: RealServer, turns: list[Any], tools: list[Any] | None) -> str:
    """Return the prompt of a chat, as its tokens say it."""
    body = {"model": MODEL, "messages": turns} | ({"tools": tools} if tools else {})
    tokens = server.client.post("/tokenize", json=body).json()["tokens"]
    text = server.client.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    return str(text.json()["prompt"])


def test_it_says_so(server: RealServer) -> None:
    info = server.client.get("/v1/server_info").json()["tools"]
    assert (info["prompt"], info["parser"]) == ("default", "hermes")
    assert "tools are shown by the default tool prompt" in server.log.read_text()


def test_a_chat_shows_tools_calls_and_results(server: RealServer, client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    assert "# Tools" not in prompt_of(server, turns, None)
    assert '"name": "look"' in prompt_of(server, turns, CHAT_TOOLS)
    named: Any = {"type": "function", "function": {"name": "look"}}
    asked: Any = {"model": MODEL, "messages": turns, "max_tokens": 64, "temperature": 0}
    answer = client.chat.completions.create(**asked, tools=CHAT_TOOLS, tool_choice=named)
    plain = client.chat.completions.create(**asked)
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 50
    message = answer.choices[0].message
    assert message.tool_calls[0].function.name == "look"
    call = {**message.tool_calls[0].to_dict()}
    call["function"] = {"name": "look", "arguments": '{"city": "Ulm"}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "21 C"}
    turns += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    prompt = prompt_of(server, turns, CHAT_TOOLS)
    assert f"assistant\n{CALL}<|im_end|>" in prompt
    assert f"user\n{RESULT}<|im_end|>" in prompt


def test_a_response_shows_tools_calls_and_results(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "max_output_tokens": 16, "store": False}
    call = {
        "type": "function_call",
        "call_id": "c",
        "name": "look",
        "arguments": '{"city": "Ulm"}',
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "21 C"}
    turns: Any = [{"role": "user", "content": QUESTION}]
    sizes = []
    for items, tools in (
        (turns, openai.NOT_GIVEN),
        (turns, RESPONSE_TOOLS),
        ([*turns, call], RESPONSE_TOOLS),
        ([*turns, call, result], RESPONSE_TOOLS),
    ):
        answer = client.responses.create(input=items, tools=tools, **asked)
        sizes.append(answer.usage.input_tokens)
    assert sizes[1] > sizes[0] + 50
    assert sizes[1] < sizes[2] < sizes[3]
    named: Any = {"type": "function", "name": "look"}
    forced = client.responses.create(
        input=turns, tools=RESPONSE_TOOLS, tool_choice=named, **asked | {"max_output_tokens": 64}
    )
    assert [(item.type, item.name) for item in forced.output] == [("function_call", "look")]


def test_a_message_shows_tools_calls_and_results(messages: Any) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    plain = messages.count_tokens(**asked).input_tokens
    shown = messages.count_tokens(**asked, tools=MESSAGE_TOOLS).input_tokens
    assert shown > plain + 50
    answer = messages.create(
        **asked, tools=MESSAGE_TOOLS, tool_choice={"type": "any"}, max_tokens=64
    )
    assert answer.usage.input_tokens + (answer.usage.cache_creation_input_tokens or 0) + (
        answer.usage.cache_read_input_tokens or 0
    ) == pytest.approx(shown, abs=1)
    assert answer.content[0].name == "look"
    used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Ulm"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "21 C"}
    asked["messages"] += [
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    assert messages.count_tokens(**asked, tools=MESSAGE_TOOLS).input_tokens > shown + 20
