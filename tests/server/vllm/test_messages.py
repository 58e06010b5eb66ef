"""Chats become messages of Anthropic's API: its own client puts the events together."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from anthropic.types import Message

from server.vllm.messages import message_events, message_of

pytestmark = pytest.mark.engine

HELD = (32, 16)
"""Tokens read from the prefix cache, and written to it."""


def chunk(delta: dict[str, Any], completion: int = 1, **choice: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-7",
        "model": "m",
        "choices": [{"index": 0, "delta": delta, **choice}],
        "usage": {"prompt_tokens": 50, "completion_tokens": completion},
    }


def call(index: int, name: str | None = None, arguments: str = "") -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    found: dict[str, Any] = {"index": index, "function": function}
    return found | ({"id": f"chatcmpl-tool-{index}f"} if name else {})


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return chunk({"tool_calls": list(calls)})


def ending(reason: str, completion: int = 8, **choice: Any) -> dict[str, Any]:
    return chunk({}, completion, finish_reason=reason, **choice)


async def events(chunks: list[dict[str, Any]], max_tokens: int | None = 100) -> str:
    async def frames() -> AsyncGenerator[str, None]:
        for one in [chunk({"role": "assistant", "content": ""}, 0), *chunks]:
            yield f"data: {json.dumps(one)}\n\n"
        yield "data: [DONE]\n\n"

    stream = message_events(frames(), max_tokens, lambda: HELD, "standard")
    return "".join([event async for event in stream])


def put_together(stream: str) -> Message:
    """Have Anthropic's client read a stream."""
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=stream)
    )
    client = Anthropic(
        api_key="k", base_url="http://x", http_client=httpx2.Client(transport=transport)
    )
    with client.messages.stream(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "a"}]
    ) as events:
        message: Message = events.get_final_message()
    return message


def kinds(stream: str) -> list[str]:
    return [line[7:] for line in stream.splitlines() if line.startswith("event: ")]


async def test_a_text_is_one_block() -> None:
    stream = await events([chunk({"content": "Hel"}), chunk({"content": "lo"}), ending("stop")])
    assert kinds(stream) == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    message = put_together(stream)
    assert message.id == "msg_7"
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello"}]
    assert message.stop_reason == "end_turn"
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == HELD
    assert (usage.input_tokens, usage.output_tokens) == (2, 8)


async def test_usage_is_told_when_the_message_starts() -> None:
    stream = await events([ending("stop")])
    start = json.loads(stream.splitlines()[1].removeprefix("data: "))["message"]
    assert start["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 16,
        "cache_read_input_tokens": 32,
        "output_tokens": 0,
        "service_tier": "standard",
    }


@pytest.mark.parametrize("reason", ["tool_calls", "stop"])
async def test_calls_are_blocks_of_their_own(reason: str) -> None:
    chunks = [
        chunk({"reasoning": "Hm."}),
        chunk({"content": "I look. "}),
        calling(call(0, "look", '{"at"')),
        calling(call(0, arguments=": 1}")),
        # Text in the middle of calls comes behind the one that is open.
        chunk({"content": "And"}),
        calling(call(0), call(1, "listen", "{}")),
        ending(reason),
    ]
    message = put_together(await events(chunks))
    assert [block.type for block in message.content] == [
        *("thinking", "text", "tool_use", "text", "tool_use"),
    ]
    _, _, first, held, second = message.content
    assert first.type == second.type == "tool_use"
    assert held.type == "text"
    assert (first.id, first.name, first.input) == ("toolu_0f", "look", {"at": 1})
    assert (second.id, second.input, held.text) == ("toolu_1f", {}, "And")
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("last", "max_tokens", "reason", "sequence"),
    [
        (ending("stop", stop_reason="END"), 100, "stop_sequence", "END"),
        (ending("stop", stop_reason=3), 100, "end_turn", None),
        (ending("length"), 8, "max_tokens", None),
        (ending("length"), 100, "model_context_window_exceeded", None),
        # Inside of its reasoning, at its end token.
        (ending("length", stop_reason=3), 100, "max_tokens", None),
    ],
)
async def test_why_a_message_stopped(
    last: dict[str, Any], max_tokens: int, reason: str, sequence: str | None
) -> None:
    message = put_together(await events([chunk({"content": "a"}), last], max_tokens))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


@pytest.mark.parametrize(
    ("last", "max_tokens", "reason"),
    [
        (ending("length"), 8, "max_tokens"),
        (ending("length"), 100, "model_context_window_exceeded"),
        (ending("stop", stop_reason="END"), 100, "stop_sequence"),
        (ending("content_filter"), 100, "refusal"),
        (ending("stop"), 100, "max_tokens"),
    ],
)
async def test_a_call_that_was_cut_does_not_ask_for_its_tool(
    last: dict[str, Any], max_tokens: int, reason: str
) -> None:
    stream = await events([calling(call(0, "f", '{"a": "b')), last], max_tokens)
    assert f'"stop_reason":"{reason}"' in stream
    (choice,) = last["choices"]
    whole = answer(choice["finish_reason"], ('{"a": "b',), stop=choice.get("stop_reason"))
    assert message_of(whole, max_tokens, "standard")["stop_reason"] == reason


def answer(finish: str, calls: tuple[str, ...] = (), stop: str | None = None, **more: Any) -> Any:
    message = {
        "reasoning": None,
        "content": None,
        "tool_calls": [
            SimpleNamespace(
                id=f"chatcmpl-tool-{number}",
                function=SimpleNamespace(name="f", arguments=arguments),
            )
            for number, arguments in enumerate(calls)
        ],
    }
    choice = SimpleNamespace(
        finish_reason=finish, stop_reason=stop, message=SimpleNamespace(**message | more)
    )
    details = SimpleNamespace(cached_tokens=32, created_cache_tokens=16)
    usage = SimpleNamespace(prompt_tokens=50, completion_tokens=8, prompt_tokens_details=details)
    return SimpleNamespace(id="chatcmpl-7", model="m", choices=[choice], usage=usage)


def test_a_whole_answer_is_the_same_message() -> None:
    message = message_of(
        answer("stop", ('{"at": 1}',), reasoning="Hm.", content="I look."), 100, "standard"
    )
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 16,
        "cache_read_input_tokens": 32,
        "output_tokens": 8,
        "service_tier": "standard",
    }
    thinking, text, used = message["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm.", "I look.")
    assert used == {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"at": 1}}


def test_half_of_a_surrogate_pair_in_a_call() -> None:
    message = message_of(answer("stop", (r'{"at": "\ud83d"}',)), 100, "standard")
    assert message["stop_reason"] == "tool_use"
    assert message["content"][-1]["input"] == {"at": "\ufffd"}


def test_a_whole_answer_that_was_cut_off_has_what_there_is() -> None:
    message = message_of(answer("length", ('{"at": 1, "by',)), 8, "standard")
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {"at": 1}
    assert (
        message_of(answer("length"), 9, "standard")["stop_reason"]
        == "model_context_window_exceeded"
    )
    assert message_of(answer("stop"), 9, "standard")["content"] == [{"type": "text", "text": ""}]
