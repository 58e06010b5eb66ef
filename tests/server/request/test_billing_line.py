"""Claude Code's billing line is dropped from system texts, and nothing else is changed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from server.request.conversation import drop_billing_line
from server.wire.endpoint import Endpoint

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
