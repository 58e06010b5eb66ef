"""Custom tools as functions: requests in both forms, and inputs from arguments in any pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from server.errors import RequestError, UnknownFieldError
from server.structured_outputs.custom_tools import InputReader, input_of, take_custom_tools
from server.wire import Endpoint

PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
ALLOWED = "allowed_tools"


def refuse(path: str, _known: tuple[str, ...]) -> None:
    raise UnknownFieldError(path, param=path)


def taken(endpoint: Endpoint, body: dict[str, Any]) -> frozenset[str]:
    return take_custom_tools(endpoint, body, refuse)


def chat_tool(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f", **fields}}


def test_a_chat_with_custom_tools() -> None:
    named = {"type": "custom", "custom": {"name": "f"}}
    call = {"id": "c", "type": "custom", "custom": {"name": "f", "input": 'a"\n'}}
    plain = {"type": "function", "function": {"name": "h"}}
    body: dict[str, Any] = {
        "tools": [chat_tool(description="d", format={"type": "text"}), chat_tool(name="g"), plain],
        "tool_choice": {"type": ALLOWED, ALLOWED: {"mode": "auto", "tools": [named, plain]}},
        "messages": [{"role": "assistant", "tool_calls": [call, plain]}],
    }
    assert taken(Endpoint.CHAT, body) == {"f", "g"}
    function = {"name": "f", "description": "d", "parameters": PARAMETERS}
    free = {"name": "g", "parameters": PARAMETERS}
    assert body["tools"][:2] == [
        {"type": "function", "function": function},
        {"type": "function", "function": free},
    ]
    stands = {"type": "function", "function": {"name": "f"}}
    assert body["tool_choice"][ALLOWED]["tools"] == [stands, plain]
    made = body["messages"][0]["tool_calls"][0]
    assert (made["id"], made["type"], made["function"]["name"]) == ("c", "function", "f")
    assert json.loads(made["function"]["arguments"]) == {"input": 'a"\n'}
    assert body["messages"][0]["tool_calls"][1] is plain


def test_a_response_with_custom_tools() -> None:
    body: dict[str, Any] = {
        "tools": [{"type": "custom", "name": "f", "format": {"type": "text"}}],
        "tool_choice": {"type": "custom", "name": "f"},
        "input": [
            {"type": "custom_tool_call", "id": None, "call_id": "c", "name": "f", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
        ],
    }
    assert taken(Endpoint.RESPONSES, body) == {"f"}
    assert body["tools"] == [{"type": "function", "name": "f", "parameters": PARAMETERS}]
    assert body["tool_choice"] == {"type": "function", "name": "f"}
    assert body["input"] == [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"input": "x"}'},
        {"type": "function_call_output", "call_id": "c", "output": "y"},
    ]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tools", [{"type": "custom"}], "tools[0].custom"),
        ("tools", [{"type": "custom", "custom": "f"}], "tools[0].custom"),
        ("tools", [chat_tool(name=5)], "tools[0].custom.name"),
        ("tools", [chat_tool(), chat_tool()], "tools[1].custom.name"),
        ("tools", [chat_tool(formats=1)], "tools[0].custom.formats"),
        ("tools", [chat_tool(format="x")], "tools[0].custom.format"),
        ("tools", [chat_tool(format={"type": "x"})], "tools[0].custom.format.type"),
        ("tools", [chat_tool(format={"type": "text", "q": 1})], "tools[0].custom.format.q"),
        ("tools", [chat_tool(format={"type": "grammar"})], "tools[0].custom.format"),
        ("tool_choice", chat_tool(), "tool_choice.custom.name"),
        (
            "tools",
            [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}],
            "tools[0].tools[0].type",
        ),
        (
            "messages",
            [{"tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}],
            "messages[0].tool_calls[0].custom.input",
        ),
    ],
)
def test_malformed_parts_are_named(field: str, value: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        taken(Endpoint.CHAT, {field: value})
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\"\\\\\\n\\u00e9\\ud83d\\ude00 b"}', 'a"\\\né😀 b'),
        (' { "input" : "" } ', ""),
        ('{"input": "half\\ud83d', "half"),
        ('{"input": "x\\ud83dy"}', "x\ufffdy"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "cut', "cut"),
        ('{"inp', '{"inp'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"code": "a"}', '{"code": "a"}'),
        ("", ""),
    ],
)
def test_an_input_is_the_same_in_any_pieces(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    pick = random.Random(0)
    for _ in range(50):
        reader, found, rest = InputReader(), "", arguments
        while rest:
            size = pick.randint(1, 4)
            found += reader.read(rest[:size])
            rest = rest[size:]
        assert found + reader.end() == text
