"""Tools of requests: `tool_choice` in each of the APIs, and requests that nothing would show."""

from typing import Any

import pytest

from server.errors import RequestError, UnsupportedFieldError
from server.tools import ToolChoice, ToolSupport, check_choice
from server.wire import Endpoint

CHAT_TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
TOOLS = [{"type": "function", "name": name} for name in ("f", "g")]
SPACES = [{"type": "namespace", "name": "n", "tools": TOOLS[:1]}]


def allowed(mode: Any = "auto", *names: str) -> dict[str, Any]:
    """Return the form of the Responses API."""
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "allowed_tools", "mode": mode, "tools": tools}


def nested(mode: Any = "auto", *names: str) -> dict[str, Any]:
    """Return the form of chats."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ({"type": "none"}, ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "any"}, ToolChoice("required")),
        (CHAT_TOOLS[0], ToolChoice("required", frozenset("f"))),
        (TOOLS[1], ToolChoice("required", frozenset("g"))),
        ({"type": "tool", "name": "f"}, ToolChoice("required", frozenset("f"))),
        (allowed("auto", "f"), ToolChoice("auto", frozenset("f"), listed=True)),
        (nested("required", "f", "g"), ToolChoice("required", frozenset("fg"), listed=True)),
        ({"type": "allowed_tools"}, ToolChoice("auto", frozenset(), listed=True)),
        (5, ToolChoice("auto")),
    ],
)
def test_forms(value: Any, choice: ToolChoice) -> None:
    found = ToolChoice.of(value)
    assert found == choice
    names = {"f"} if choice.names is None else choice.names
    assert found.allows("f") is (choice.mode != "none" and "f" in names)


@pytest.mark.parametrize(
    ("endpoint", "tools", "choice"),
    [
        ("CHAT", CHAT_TOOLS, nested("auto", "f")),
        ("CHAT", CHAT_TOOLS, CHAT_TOOLS[1]),
        ("CHAT", CHAT_TOOLS, "required"),
        ("CHAT", None, "none"),
        ("CHAT", None, None),
        ("RESPONSES", TOOLS, allowed("required", "g", "f")),
        ("RESPONSES", SPACES, allowed("required", "n__f")),
        ("RESPONSES", SPACES, TOOLS[0]),
        ("MESSAGES", TOOLS, {"type": "tool", "name": "g"}),
        ("MESSAGES", TOOLS, {"type": "any", "disable_parallel_tool_use": True}),
        ("TOKENIZE", None, "required"),
        # Wrong types are the request models' to refuse.
        ("CHAT", 5, nested("auto", "f")["type"]),
        ("CHAT", CHAT_TOOLS, 5),
    ],
)
def test_choices_among_the_tools_pass(endpoint: str, tools: Any, choice: Any) -> None:
    check_choice(Endpoint[endpoint], {"tools": tools, "tool_choice": choice})


@pytest.mark.parametrize(
    ("endpoint", "choice", "param", "words"),
    [
        ("CHAT", {"type": "function", "function": {"name": "h"}}, "tool_choice.function.name",
         "got 'h'; its tools are 'f', 'g'"),
        ("RESPONSES", {"type": "function", "name": "h"}, "tool_choice.name", "got 'h'"),
        ("MESSAGES", {"type": "tool", "name": "h"}, "tool_choice.name", "got 'h'"),
        ("CHAT", nested("auto", "f", "h"),
         "tool_choice.allowed_tools.tools[1].function.name", "got 'h'"),
        ("RESPONSES", allowed("auto", "h"), "tool_choice.tools[0].name", "got 'h'"),
        ("CHAT", nested("any", "f"), "tool_choice.allowed_tools.mode", "got 'any'"),
        ("RESPONSES", allowed(5, "f"), "tool_choice.mode", "got 5"),
        ("RESPONSES", allowed("auto"), "tool_choice.tools", "at least one tool"),
        ("CHAT", nested("auto"), "tool_choice.allowed_tools.tools", "at least one tool"),
        ("CHAT", allowed("auto", "f"), "tool_choice.allowed_tools", "is missing"),
        ("RESPONSES", nested("auto", "f"), "tool_choice.mode", "is missing"),
        ("RESPONSES", {**allowed("auto"), "tools": [{"type": "mcp"}]},
         "tool_choice.tools[0].type", "got 'mcp'"),
        ("CHAT", {"type": "allowed_tools",
                  "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}},
         "tool_choice.allowed_tools.tools[0].function", "is missing"),
    ],
)  # fmt: skip
def test_a_refusal_names_field_and_value(
    endpoint: str, choice: Any, param: str, words: str
) -> None:
    tools = CHAT_TOOLS if endpoint == "CHAT" else TOOLS
    with pytest.raises(RequestError) as caught:
        check_choice(Endpoint[endpoint], {"tools": tools, "tool_choice": choice})
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("endpoint", "choice"),
    [
        ("CHAT", "required"),
        ("RESPONSES", {"type": "function", "name": "f"}),
        ("MESSAGES", {"type": "any"}),
        ("MESSAGES", {"type": "tool", "name": "f"}),
        ("RESPONSES", allowed("required", "f")),
    ],
)
@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}])
def test_a_demand_needs_tools(endpoint: str, choice: Any, tools: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="has no 'tools'") as caught:
        check_choice(Endpoint[endpoint], {"tool_choice": choice, **tools})
    assert caught.value.param == "tool_choice"


NONE = ToolSupport("none", None, "the chat template shows no tools")
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("CHAT", {"tools": [TOOL]}, "tools"),
        ("MESSAGES", {"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        ("TOKENIZE", {"tools": [TOOL]}, "tools"),
        ("CHAT", {"messages": [{"role": "user", "content": "a"}, {"role": "tool"}]}, "messages[1]"),
        ("CHAT", {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
         "messages[0].tool_calls"),
        ("RESPONSES", {"input": ["a", {"type": "function_call_output"}]}, "input[1]"),
        ("RESPONSES", {"input": [{"type": "function_call"}]}, "input[0]"),
        ("MESSAGES", {"messages": [{"content": [{"type": "text"}, {"type": "tool_use"}]}]},
         "messages[0].content[1]"),
        ("MESSAGES", {"messages": [{"content": [{"type": "tool_result"}]}]},
         "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_tools_and_calls_that_would_not_be_shown(
    endpoint: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedFieldError, match="shows no tools") as caught:
        NONE.check(Endpoint[endpoint], fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "a"}], "tools": []},
        {"input": "a", "tools": None},
        {"messages": 5, "input": [5, None]},
    ],
)
def test_conversations_without_tools_pass(fields: dict[str, Any]) -> None:
    for endpoint in (Endpoint.CHAT, Endpoint.RESPONSES, Endpoint.MESSAGES):
        NONE.check(endpoint, fields)
