"""Whether an answer is right: text by its words, JSON by its values, calls by their arguments."""

from __future__ import annotations

import json
from typing import Any

from default_model.corpus.dialogue import Dialogue

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def normalised(text: str) -> str:
    """Return `text` in lower case, without spaces and stops at its ends and doubled inside."""
    return " ".join(text.lower().split()).strip(" .!")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def called(text: str) -> Any:
    """Return the call that `text` makes, as {"name", "arguments"}, or None if it makes none."""
    head, opened, rest = text.partition(OPEN)
    body, closed, tail = rest.partition(CLOSE)
    if not (opened and closed) or head.strip() or tail.strip():
        return None
    return _parsed(body)


def is_right(dialogue: Dialogue, text: str) -> bool:
    """Tell whether `text` answers as the dialogue's own answer does.

    An object may have any of the pairs in `dialogue.pairs`, two at least where there are two; other
    JSON must be equal.
    """
    calls = dialogue.answer.get("tool_calls")
    if calls:
        function = calls[0]["function"]
        return bool(called(text) == {"name": function["name"], "arguments": function["arguments"]})
    wanted = dialogue.answer["content"]
    if dialogue.pairs:
        given, pairs = _parsed(text), dialogue.pairs
        enough = isinstance(given, dict) and len(given) >= min(2, len(pairs))
        return enough and all(pairs.get(key) == value for key, value in given.items())
    if wanted[:1] in "[{":
        return bool(_parsed(text) == json.loads(wanted))
    return normalised(text) == normalised(wanted)
