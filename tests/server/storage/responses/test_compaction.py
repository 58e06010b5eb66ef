"""Compaction of a conversation, and expansion of its item in a later request."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from server.errors import InvalidValueError, MissingFieldError
from server.storage.compaction import (
    compacted,
    compaction_item,
    expand_compactions,
    max_summary_tokens,
    summarise,
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def content(text: bytes) -> str:
    return "rbln1." + base64.urlsafe_b64encode(text).decode()


def expanded(*items: Any) -> list[Any]:
    body = {"input": [*items]}
    expand_compactions(body)
    return body["input"]


def texts(message: Any) -> list[str]:
    found = message["content"]
    return [found] if isinstance(found, str) else [part["text"] for part in found]


@pytest.mark.parametrize("summary", ["They met.", "a\n\u2603\U0001f600?>\\ud800" * 99])
def test_a_summary_comes_back_as_an_answer(summary: str) -> None:
    first, message = expanded(user("a"), compaction_item(summary))
    assert first == user("a")
    assert message["role"] == "assistant"
    assert texts(message)[0].endswith(summary)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        7,
        "",
        "gAAAAABpM0Yj",
        "rbln2." + content(b'{"summary":"a"}')[6:],
        "rbln1.",
        "rbln1.\u2603",
        content(b'{"summary":"a"}') + "!",
        content(b"\xff"),
        content(b"null"),
        content(b"[]"),
        content(b'"summary"'),
        content(b'{"summary":7}'),
        content(b'{"summary":"a","role":"system"}'),
    ],
)
def test_content_of_another_kind_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValueError) as caught:
        expanded(user("a"), {"type": "compaction", "encrypted_content": wrong})
    assert caught.value.param == "input[1].encrypted_content"


def test_other_items_stay() -> None:
    items = [user("a"), "b", 7, {"type": "reasoning"}, {"type": ["compaction"]}]
    assert expanded(*items) == items
    body = {"input": "a"}
    expand_compactions(body)
    assert body == {"input": "a"}


CONVERSATION: list[Any] = [
    {"role": "system", "content": "Be short."},
    user("one"),
    {"role": "assistant", "content": "two"},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "seen"},
    {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
    {"type": "message", "role": "developer", "content": "In verse."},
]


def test_users_and_instructions_stay() -> None:
    body: dict[str, Any] = {"input": [*CONVERSATION]}
    kept = summarise(body, 8192)
    assert [message["role"] for message in kept] == ["system", "developer", "user"]
    assert texts(kept[2]) == ["one", "three"]
    assert len({message["id"] for message in kept}) == 3
    assert body["input"][: len(CONVERSATION)] == CONVERSATION
    assert body["input"][-1]["role"] == "user"
    assert body["max_output_tokens"] == 1024


def test_the_instruction_is_part_of_the_last_turn_of_the_user() -> None:
    body: dict[str, Any] = {"input": "one"}
    kept = summarise(body, 80)
    (turn,) = body["input"]
    assert texts(turn)[0] == "one"
    assert texts(kept[0]) == ["one"]
    assert body["max_output_tokens"] == 10
    body = {"input": CONVERSATION[:3]}
    summarise(body, 80)
    assert [turn["role"] for turn in body["input"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("given", [None, "", []])
def test_nothing_cannot_be_compacted(given: Any) -> None:
    with pytest.raises(MissingFieldError) as caught:
        summarise({"input": given}, 80)
    assert caught.value.param == "input"


def test_summaries_have_a_bound() -> None:
    assert [max_summary_tokens(size) for size in (4, 256, 8192, 10**6)] == [1, 32, 1024, 1024]


def test_the_window_ends_with_the_summary() -> None:
    response = {"id": "resp_1", "created_at": 1, "usage": {"input_tokens": 1}}
    made = compacted(response, [user("a")], "They met.")
    assert made["output"][0] == user("a")
    assert made["output"][1]["type"] == "compaction"
    assert made["output"][1]["id"].startswith("cmp_")
    assert (made["id"], made["object"]) == ("resp_1", "response.compaction")
