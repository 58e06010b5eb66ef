"""Tools: offered, demanded, named, and their results handed back."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

HI: list[Any] = [{"role": "user", "content": "Switch the lamp on."}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"lit": {"type": "boolean"}, "color": {"enum": ["red", "green"]}},
    "required": ["lit", "color"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "switch_lamp", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ring", "parameters": {"type": "object"}}},
]
NAMED: Any = {"type": "function", "function": {"name": "switch_lamp"}}


def ask(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    wish = {"messages": HI, "tools": TOOLS, "max_tokens": 16, **wish}
    return client.chat.completions.create(model=model, **wish)


def called(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    """The first choice of some seeds that ends with a call and was not cut off."""
    for seed in range(6):
        choice = ask(client, model, max_tokens=128, temperature=1.5, seed=seed, **wish).choices[0]
        if choice.finish_reason in ("stop", "tool_calls") and choice.message.tool_calls:
            return choice
    pytest.fail("no call was finished within 128 tokens, for 6 seeds")


def test_tools_may_be_left_alone(client: openai.OpenAI, model: str) -> None:
    assert ask(client, model, tool_choice="none").choices[0].message.tool_calls in (None, [])


def test_tools_are_offered(client: openai.OpenAI, model: str) -> None:
    offered = ask(client, model).usage.prompt_tokens
    assert offered > ask(client, model, tools=openai.NOT_GIVEN).usage.prompt_tokens


def test_a_named_tool_is_called_by_its_schema(client: openai.OpenAI, model: str) -> None:
    choice = called(client, model, tools=TOOLS[:1], tool_choice=NAMED)
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.id
    assert call.function.name == "switch_lamp"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_some_tool_is_called_when_one_is_demanded(client: openai.OpenAI, model: str) -> None:
    choice = called(client, model, tools=TOOLS[:1], tool_choice="required")
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        assert call.function.name == "switch_lamp"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)


def test_a_call_is_streamed_in_pieces(client: openai.OpenAI, model: str) -> None:
    for seed in range(6):
        stream = ask(
            client,
            model,
            tools=TOOLS[:1],
            tool_choice=NAMED,
            stream=True,
            max_tokens=128,
            temperature=1.5,
            seed=seed,
        )
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        if chunks[-1].finish_reason == "length":
            continue
        pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
        assert [piece.function.name for piece in pieces if piece.function.name] == ["switch_lamp"]
        text = "".join(piece.function.arguments or "" for piece in pieces)
        jsonschema.validate(json.loads(text), PARAMETERS)
        return
    pytest.fail("no call was finished within 128 tokens, for 6 seeds")


def test_a_result_is_handed_back(client: openai.OpenAI, model: str) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "switch_lamp", "arguments": '{"lit":true,"color":"red"}'},
    }
    turns = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    assert ask(client, model, messages=turns, tool_choice="none").choices[0].message.role


def test_an_unknown_tool_is_refused(client: openai.OpenAI, model: str) -> None:
    named: Any = {"type": "function", "function": {"name": "no_such_tool"}}
    with pytest.raises(openai.BadRequestError):
        ask(client, model, tool_choice=named)


def test_a_demand_without_tools_is_refused(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, model, tools=openai.NOT_GIVEN, tool_choice="required")


def test_a_bad_schema_of_a_demanded_tool_is_refused(client: openai.OpenAI, model: str) -> None:
    bad = {"name": "x", "parameters": {"type": "object", "properties": {"a": {"type": "nope"}}}}
    with pytest.raises(openai.BadRequestError):
        ask(client, model, tools=[{"type": "function", "function": bad}], tool_choice="required")
