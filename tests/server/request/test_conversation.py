"""Messages before vLLM's models: the billing line, and arguments of earlier calls."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from server.errors import InvalidJsonError, InvalidValueError
from server.request.body import drop_billing_line, parse_json_object
from server.request.sizes import check_call_arguments
from server.wire import Endpoint

BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def dropped(body: dict[str, Any], endpoint: Endpoint = Endpoint.MESSAGES) -> dict[str, Any]:
    drop_billing_line(endpoint, body)
    return body


def test_the_line_never_reaches_a_model() -> None:
    body = {"system": [part(BILLING), part("You are"), part("")], "messages": []}
    assert dropped(body)["system"] == [part("You are"), part("")]
    # vLLM drops the whole block that begins with the line.
    assert dropped({"system": [part(f"{BILLING}\nYou are")]})["system"] == [part("You are")]
    assert dropped({"system": BILLING, "messages": []})["system"] == ""
    inline = {"role": "system", "content": f"{BILLING}\nYou are"}
    assert dropped({"messages": [inline]})["messages"] == [{"role": "system", "content": "You are"}]


def test_other_apis_keep_it() -> None:
    body = {"messages": [{"role": "system", "content": BILLING}]}
    assert dropped(deepcopy(body), Endpoint.CHAT) == body


@pytest.mark.parametrize(
    "body",
    [
        {"system": "Today's date: 2026-11-23", "messages": [{"role": "user", "content": BILLING}]},
        {"system": f"Not at the start: {BILLING}"},
        {"system": 5, "messages": "a"},
        {"system": None, "messages": [None, {"role": "system"}, {"role": "system", "content": 1}]},
    ],
)
def test_nothing_else_is_changed(body: dict[str, Any]) -> None:
    assert dropped(deepcopy(body)) == body


DEPTH = 8


def chat(text: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": text}
    return {
        "messages": [
            {"role": "user"},
            {"role": "assistant", "tool_calls": [{"function": function}]},
        ]
    }


def response(text: Any) -> dict[str, Any]:
    return {"input": [{"type": "function_call", "name": "f", "arguments": text}]}


FORMS = [
    (chat, "messages[1].tool_calls[0].function.arguments"),
    (response, "input[0].arguments"),
]


@pytest.mark.parametrize(("form", "place"), FORMS)
@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("[" * 9 + "]" * 9, "deeper than the limit of 8"),
        ("[" * 100_000, "deeper than the limit of 8"),
        ('{"a":' * 9 + "1" + "}" * 9, "deeper than the limit of 8"),
        ('{"a": "\\\\"' + ', "b": [' * 9, "deeper than the limit of 8"),
        ("9" * 401, "more than 400 digits"),
        (f'{{"a": [-{"9" * 5000}]}}', "more than 400 digits"),
    ],
)
def test_arguments_beyond_the_limits(form: Any, place: str, text: str, limit: str) -> None:
    with pytest.raises(InvalidValueError, match=limit) as caught:
        check_call_arguments(form(text), DEPTH)
    assert caught.value.param == place
    assert place in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "[" * 8 + "]" * 8,
        "[{}]" * 20,
        '{"a": "' + "[" * 99 + '"}',
        '{"a": "\\"' + "[" * 99 + '"}',
        '"' + "[" * 99,
        f'{{"a": "{"9" * 5000}", "b": 0.{"9" * 500}, "c": {"9" * 500}e-400}}',
        "not JSON \\",
        "",
        r'{"a": "\ud83d\ude00 \\ud83d é"}',
        None,
        5,
    ],
)
def test_other_arguments_stay(text: Any) -> None:
    for form, _ in FORMS:
        body = form(text)
        check_call_arguments(body, DEPTH)
        assert body == form(text)


def test_halves_of_characters_are_replaced() -> None:
    text = r'{"a": "\ud83d \uDE00 \ud83d\ud83d\ude00 \\\ud83d", "\udead": 1}'
    whole = r'{"a": "\ufffd \ufffd \ufffd\ud83d\ude00 \\\ufffd", "\ufffd": 1}'
    for form, _ in FORMS:
        body = form(text)
        check_call_arguments(body, DEPTH)
        assert body == form(whole)
    assert json.loads(whole)["a"] == "\ufffd \ufffd \ufffd\U0001f600 \\\ufffd"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": "text"},
        {"input": ["a", 1]},
        {"messages": 5},
        {"messages": [{"tool_calls": 5}]},
    ],
)
def test_other_bodies_are_left_to_the_models(body: dict[str, Any]) -> None:
    check_call_arguments(body, DEPTH)


def test_halves_in_arguments_that_the_client_has_parsed() -> None:
    call: dict[str, Any] = {"type": "tool_use", "id": "1", "input": {"a": "\ud83d"}}
    turns: list[Any] = [{"role": "user", "content": "é"}, {"role": "assistant", "content": [call]}]
    body = parse_json_object(json.dumps({"messages": turns}).encode(), DEPTH)
    call["input"] = {"a": "\ufffd"}
    assert body == {"messages": turns}
    turns[0]["content"] = "\ud83d"
    with pytest.raises(InvalidJsonError, match="half of a surrogate pair") as caught:
        parse_json_object(json.dumps({"messages": turns}).encode(), DEPTH)
    assert caught.value.param == "messages[0].content"
