"""Request fields that a response repeats."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidTypeError
from server.storage.response_table import shown_request

FUNCTION = {"type": "function", "name": "look"}


def test_an_empty_request_is_shown_by_its_defaults() -> None:
    shown = shown_request({}, {})
    assert shown["tool_choice"] == "auto"
    assert shown["text"] == {"format": {"type": "text"}}
    assert shown["reasoning"] == {"effort": None, "summary": None}
    assert (shown["tools"], shown["metadata"], shown["top_logprobs"]) == ([], {}, 0)
    assert (shown["temperature"], shown["top_p"]) == (1.0, 1.0)
    assert shown["max_output_tokens"] is None


def test_the_models_own_sampling_is_a_default() -> None:
    sampling = {"temperature": 0.6, "max_tokens": 7}
    assert shown_request({}, sampling)["temperature"] == 0.6
    shown = shown_request({"temperature": 0}, sampling)
    assert shown["temperature"] == 0
    assert "max_tokens" not in shown


def test_what_was_sent_is_shown_and_copied() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    body: dict[str, Any] = {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": schema, "verbosity": "low"},
        "safety_identifier": "s",
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "parallel_tool_calls": False,
    }
    shown = shown_request(body, {})
    body["tools"].clear()
    assert shown["tools"] == [{"description": None, "parameters": None, "strict": None, **FUNCTION}]
    assert shown["text"]["format"] == {"description": None, "strict": False, **schema}
    assert shown["text"]["verbosity"] == "low"
    assert shown["reasoning"] == {"effort": "low", "summary": None}
    for name in ("tool_choice", "safety_identifier", "metadata", "parallel_tool_calls"):
        assert shown[name] == body[name]


@pytest.mark.parametrize("name", ["text", "tools", "reasoning"])
@pytest.mark.parametrize("value", [7, "x", ["x"], None])
def test_what_is_refused_later_is_no_fault_here(name: str, value: Any) -> None:
    assert name in shown_request({name: value}, {})


def test_a_label_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="safety_identifier"):
        shown_request({"safety_identifier": 7}, {})
