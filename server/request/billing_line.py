"""Claude Code's billing line, which changes with every request and says nothing to a model."""

from __future__ import annotations

import re
from typing import Any

from server.wire.endpoint import Endpoint, JsonObject

_BILLING = re.compile(r"^x-anthropic-billing-header:.*(?:\n|\Z)", re.MULTILINE)
_SYSTEM_ROLES = ("system", "developer")


def drop_billing_line(endpoint: Endpoint, body: JsonObject) -> None:
    """Drop the line from the system texts of a body, in place, if the API is Anthropic's.

    A prefix match ends at the first token that differs, so the line would prevent every match.
    Anthropic's API shows it to no model, either.
    """
    if not endpoint.anthropic:
        return
    if "system" in body:
        body["system"] = _without_line(body["system"])
    turns = body.get("messages")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and turn.get("role") in _SYSTEM_ROLES and "content" in turn:
            turn["content"] = _without_line(turn["content"])


def _without_line(content: Any) -> Any:
    """Return a text, or a list of parts, without the line; parts that become empty go."""
    if isinstance(content, str):
        return _BILLING.sub("", content)
    if not isinstance(content, list):
        return content
    kept = []
    for part in content:
        if isinstance(part, dict) and isinstance(given := part.get("text"), str):
            text = _BILLING.sub("", given)
            if given and not text:
                continue
            part["text"] = text
        kept.append(part)
    return kept
