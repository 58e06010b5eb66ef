"""Lines that change at the head of a prompt are dropped or go behind everything else."""

from __future__ import annotations

from typing import Any

import pytest

from server.request.volatile_lines import settle_lines
from server.wire.endpoint import Endpoint

BILLING = "x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;"
CLOCK = "Today's date: 2026-11-23"


def settled(endpoint: Endpoint, body: dict[str, Any], *rules: Any) -> dict[str, Any]:
    settle_lines(endpoint, body, rules)
    return body


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def part(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def test_claude_codes_billing_line_never_reaches_a_model() -> None:
    body = {"system": [part(BILLING), part("You are"), part("")], "messages": [user("a")]}
    assert settled(Endpoint.MESSAGES, body)["system"] == [part("You are"), part("")]
    # vLLM drops the whole block that begins with the line.
    body = {"system": [part(f"{BILLING}\nYou are")], "messages": [user("a")]}
    assert settled(Endpoint.MESSAGES, body)["system"] == [part("You are")]
    assert settled(Endpoint.COUNT_TOKENS, {"system": BILLING, "messages": []})["system"] == ""


def test_nothing_else_is_touched_unless_a_rule_says_so() -> None:
    system = {"role": "system", "content": f"{BILLING}\n{CLOCK}\nYou are"}
    body = {"messages": [dict(system), user("a")]}
    assert settled(Endpoint.CHAT, body) == {"messages": [system, user("a")]}
    body = {"messages": [dict(system), user(BILLING)]}
    found = settled(Endpoint.CHAT, body, "billing")["messages"]
    assert found == [{"role": "system", "content": f"{CLOCK}\nYou are"}, user(BILLING)]


@pytest.mark.parametrize(
    "line",
    [
        CLOCK,
        "Current time: Mon Nov 23 06:11:40 UTC 2026",
        "- The current date is November 23, 2026.",
        "Today is Monday, 23 November 2026",
        "  <current_date>2026-11-23</current_date>",
        "Current Date and Time (UTC): 2026-11-23 06:11",
    ],
)
def test_a_clock_is_moved_to_the_end(line: str) -> None:
    body = {"system": f"You are.\n{line}\nDo.", "messages": [user("a"), user("b")]}
    assert settled(Endpoint.MESSAGES, body, "clock") == {
        "system": "You are.\nDo.",
        "messages": [user("a"), user(f"b\n\n{line.strip()}")],
    }


@pytest.mark.parametrize(
    "line", ["It takes time: be patient.", "Update files", "The year 2026 was long", "now"]
)
def test_what_is_no_clock_stays(line: str) -> None:
    body = {"system": f"You are.\n{line}", "messages": [user("a")]}
    assert settled(Endpoint.MESSAGES, dict(body), "clock") == body


@pytest.mark.parametrize(
    ("endpoint", "body", "end"),
    [
        (
            Endpoint.MESSAGES,
            {"system": CLOCK, "messages": [user([{"type": "tool_result"}])]},
            [user([{"type": "tool_result"}, part(CLOCK)])],
        ),
        (
            Endpoint.CHAT,
            {"messages": [{"role": "developer", "content": CLOCK}, {"role": "tool"}]},
            [{"role": "developer", "content": ""}, {"role": "tool"}, user(CLOCK)],
        ),
        (
            Endpoint.RESPONSES,
            {"instructions": CLOCK, "input": [user([part("a", "input_text")])]},
            [user([part("a", "input_text"), part(CLOCK, "input_text")])],
        ),
        (Endpoint.RESPONSES, {"instructions": CLOCK, "input": "a"}, [user(f"a\n\n{CLOCK}")]),
        (
            Endpoint.RESPONSES,
            {"instructions": CLOCK, "input": [{"type": "function_call_output"}]},
            [{"type": "function_call_output"}, user(CLOCK)],
        ),
    ],
)
def test_the_end_is_each_apis_own(
    endpoint: Endpoint, body: dict[str, Any], end: list[dict[str, Any]]
) -> None:
    found = settled(endpoint, body, "clock")
    assert (found.get("messages") or found["input"]) == end


@pytest.mark.parametrize("messages", [[{"role": "assistant", "content": "The"}], [], None, [7]])
def test_where_nothing_may_follow_the_clock_stays(messages: object) -> None:
    body = {"system": CLOCK, "messages": messages}
    assert settled(Endpoint.MESSAGES, dict(body), "clock") == body


def test_other_endpoints_and_wrong_types_pass() -> None:
    for body in ({"prompt": BILLING}, {"input": 7}):
        assert settled(Endpoint.COMPLETION, dict(body), "billing", "clock") == body
    body = {"system": 7, "messages": [{"role": "system", "content": 7}, user("a")]}
    assert settled(Endpoint.MESSAGES, dict(body), "billing", "clock") == body
