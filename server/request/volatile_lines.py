"""Rules for lines of a system prompt that change from request to request.

A prefix match ends at the first token that differs, so that a changing line at the head of a prompt
prevents every match. A rule drops the line or moves it to the end. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

from server.wire.endpoint import Endpoint, JsonObject

LineRule = Literal["billing", "clock"]
"""`billing`: Claude Code's `x-anthropic-billing-header: ...`, which says nothing to a model, is
dropped. `clock`: a line that says the date or the time is moved to the end of the conversation."""

_BILLING = re.compile(r"^x-anthropic-billing-header:.*(?:\n|\Z)", re.MULTILINE)
_CLOCK = re.compile(
    r"^[ \t*-]*(?:[A-Za-z' ]{0,40}\b(?:date|time|today|now)\b[A-Za-z' ()]{0,20}(?::| is)[ \t]*"
    r"|<(?:current_)?(?:date|time|datetime)>)[^\n]{0,60}\d[^\n]{0,60}(?:\n|\Z)",
    re.MULTILINE | re.IGNORECASE,
)
_SYSTEM_ROLES = ("system", "developer")
_CONVERSATION: Mapping[Endpoint, tuple[str, str | None]] = {
    Endpoint.MESSAGES: ("messages", "system"),
    Endpoint.COUNT_TOKENS: ("messages", "system"),
    Endpoint.CHAT: ("messages", None),
    Endpoint.RENDER_CHAT: ("messages", None),
    Endpoint.RESPONSES: ("input", "instructions"),
    Endpoint.INPUT_TOKENS: ("input", "instructions"),
    Endpoint.COMPACT: ("input", "instructions"),
}
"""Fields with an endpoint's turns and its system text."""


def settle_lines(endpoint: Endpoint, body: JsonObject, rules: Collection[LineRule]) -> None:
    """Drop and move the lines of `rules`, in place.

    Anthropic's API never shows a model its own client's billing line.
    """
    if endpoint not in _CONVERSATION:
        return
    turns_name, system_name = _CONVERSATION[endpoint]
    turns = body.get(turns_name)
    if endpoint.anthropic or "billing" in rules:
        _rewrite(body, turns, system_name, lambda text: _BILLING.sub("", text))
    if "clock" not in rules:
        return
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list) or not _may_end_with_lines(turns):
        return
    moved: list[str] = []

    def take(text: str) -> str:
        moved.extend(line.strip() for line in _CLOCK.findall(text))
        return _CLOCK.sub("", text)

    _rewrite(body, turns, system_name, take)
    if moved:
        body[turns_name] = [*turns[:-1], *_with_lines(turns[-1], "\n".join(moved), endpoint)]


def _rewrite(
    body: JsonObject, turns: object, system_name: str | None, change: Callable[[str], str]
) -> None:
    """Change every system text of a body; parts that become empty go."""
    if system_name is not None and system_name in body:
        body[system_name] = _changed(body[system_name], change)
    for turn in _dicts(turns):
        if turn.get("role") in _SYSTEM_ROLES and "content" in turn:
            turn["content"] = _changed(turn["content"], change)


def _changed(content: Any, change: Callable[[str], str]) -> Any:
    if isinstance(content, str):
        return change(content)
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        if isinstance(part, dict) and isinstance(given := part.get("text"), str):
            text = change(given)
            if given and not text:
                continue
            part["text"] = text
        kept.append(part)
    return kept


def _may_end_with_lines(turns: list[Any]) -> bool:
    """Return True if a text may follow the last turn: not after the beginning of an answer."""
    last = turns[-1] if turns else None
    return isinstance(last, dict) and last.get("role") != "assistant"


def _with_lines(last: JsonObject, lines: str, endpoint: Endpoint) -> list[JsonObject]:
    """Return the last turn with the lines, in it if it is the user's, else as a new turn."""
    content = last.get("content")
    if last.get("role") == "user" and isinstance(content, str):
        return [{**last, "content": f"{content}\n\n{lines}"}]
    kind = "input_text" if endpoint.takes_items else "text"
    if last.get("role") == "user" and isinstance(content, list):
        return [{**last, "content": [*content, {"type": kind, "text": lines}]}]
    return [last, {"role": "user", "content": lines}]


def _dicts(value: object) -> Iterator[JsonObject]:
    yield from (item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()
