"""Requests with tools, where nothing would show them to the model."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import UnsupportedFieldError
from server.tools import ToolSupport
from server.wire.endpoint import Endpoint

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
    for prompt in ("template", "default"):
        ToolSupport(prompt, "hermes", "").check(Endpoint[endpoint], fields)  # type: ignore[arg-type]


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
