"""Custom tools through the SDK: texts as inputs, whole and streamed, and their outputs."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCustomToolCall

HI: list[Any] = [{"role": "user", "content": "Set the dial."}]
TOOL: Any = {"type": "custom", "custom": {"name": "dial", "format": {"type": "text"}}}
FLAT: Any = {"type": "custom", "name": "dial", "format": {"type": "text"}}
NAMED: Any = {"type": "custom", "custom": {"name": "dial"}}
ONLY: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}


@pytest.mark.parametrize("choice", [NAMED, ONLY], ids=["named", "allowed"])
def test_a_chat_calls_it(client: openai.OpenAI, model: str, choice: Any) -> None:
    wish: Any = {
        "model": model,
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 96,
        "parallel_tool_calls": False,
        "seed": 1,
    }
    whole = client.chat.completions.create(messages=HI, **wish).choices[0]
    call = whole.message.tool_calls[0]
    assert (call.type, call.custom.name) == ("custom", "dial")
    with client.chat.completions.create(messages=HI, stream=True, **wish) as stream:
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces = [piece.to_dict() for c in chunks for piece in c.delta.tool_calls or ()]
    assert (pieces[0]["type"], pieces[0]["custom"]["name"]) == ("custom", "dial")
    assert pieces[0]["id"]
    assert len(pieces) > 1
    assert "".join(piece["custom"]["input"] for piece in pieces) == call.custom.input
    assert chunks[-1].finish_reason == whole.finish_reason
    turns = [*HI, whole.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": ""}]
    longer = client.chat.completions.create(messages=turns, model=model, max_tokens=1)
    shorter = client.chat.completions.create(messages=turns[:1], model=model, max_tokens=1)
    assert longer.usage.prompt_tokens > shorter.usage.prompt_tokens


def test_a_response_calls_it(client: openai.OpenAI, model: str) -> None:
    wish: Any = {
        "model": model,
        "tools": [FLAT],
        "tool_choice": {"type": "custom", "name": "dial"},
        "max_output_tokens": 96,
        "temperature": 0,
    }
    whole = client.responses.create(input=HI, **wish)
    (call,) = whole.output
    assert isinstance(call, ResponseCustomToolCall)
    assert call.name == "dial"
    assert isinstance(call.input, str)
    assert whole.tools[0].to_dict() == FLAT
    with client.responses.create(input=HI, stream=True, **wish) as stream:
        events = list(stream)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == call.input
    (final,) = events[-1].response.output
    assert (final.type, final.id, final.input) == ("custom_tool_call", done.item_id, call.input)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    later = client.responses.create(
        model=model, input=[*HI, call.to_dict(), result], max_output_tokens=16
    )
    assert later.usage.input_tokens > whole.usage.input_tokens - 200
    stored = client.responses.create(
        model=model, previous_response_id=whole.id, input=[result], max_output_tokens=16
    )
    assert stored.usage.input_tokens == later.usage.input_tokens


def test_a_grammar_is_refused(client: openai.OpenAI, model: str) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tool: Any = {**FLAT, "format": grammar}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=model, input=HI, tools=[tool], tool_choice="required")
    assert raised.value.param == "tools[0].format"
