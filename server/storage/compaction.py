"""Compaction of a conversation: the request for a summary, and the item with the summary.

The item is encoded plain text, not encrypted: its owner has the conversation already, and a key
would have to be shared by replicas. A client can send any text in it; it becomes an assistant
message and is validated like other input.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Any

from pydantic_core import from_json, to_json

from server.errors import InvalidValueError, MissingFieldError
from server.wire import JsonObject

COMPACTION = "compaction"
MAX_SUMMARY_TOKENS = 1024
_CONTEXT_SHARE = 8
"""Context length divided by the largest length of a summary, if below `MAX_SUMMARY_TOKENS`."""
_INSTRUCTION = (
    "Summarise the conversation above so that it can go on from the summary alone. Keep every "
    "fact, decision, name and number that later turns may need, what was done, and what is still "
    "to do. Answer with the summary only."
)
_HEADING = "Summary of the conversation so far:\n"
_PREFIX = "rbln1."
"""Prefix of items of this server, with their version."""
_CONTENT = "encrypted_content"
_TRIGGER = "compaction_trigger"
_OF_ANSWERS = tuple(
    "tools tool_choice parallel_tool_calls text structured_outputs stop top_logprobs include "
    "ignore_eos min_tokens".split()
)
"""Fields of an answer that a summary does not have."""
_INSTRUCTING_ROLES = ("system", "developer")


def max_summary_tokens(max_model_len: int) -> int:
    return max(1, min(MAX_SUMMARY_TOKENS, max_model_len // _CONTEXT_SHARE))


def compaction_item(summary: str) -> JsonObject:
    """Return the item that replaces a conversation in later requests."""
    text = base64.urlsafe_b64encode(to_json({"summary": summary})).decode()
    return {"id": f"cmp_{uuid.uuid4().hex}", "type": COMPACTION, _CONTENT: _PREFIX + text}


def expand_compactions(body: JsonObject) -> None:
    """Replace the compaction items of `input` by messages with their summaries.

    Raises `InvalidValueError` for an item of another server.
    """
    items = body.get("input")
    if not isinstance(items, list):
        return
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == COMPACTION:
            items[index] = _message(item, f"input[{index}].{_CONTENT}")


def take_trigger(body: JsonObject) -> bool:
    """Remove a `compaction_trigger` at the end of `input`, and what only other answers obey.

    Returns whether there was one. Raises `InvalidValueError` for one before other items.
    """
    items = body.get("input")
    if not isinstance(items, list):
        return False
    found = [
        n for n, item in enumerate(items) if isinstance(item, dict) and item.get("type") == _TRIGGER
    ]
    if not found:
        return False
    if found[0] != len(items) - 1:
        raise InvalidValueError(
            f"'input[{found[0]}]' must be the last item: a {_TRIGGER} compacts all before it.",
            param=f"input[{found[0]}]",
        )
    body["input"] = items[:-1]
    for name in _OF_ANSWERS:
        body.pop(name, None)
    return True


def summarise(body: JsonObject, max_model_len: int) -> list[JsonObject]:
    """Turn the body of a compaction request into one for the summary.

    Returns the messages to retain: system and developer messages, then one user message with the
    parts of all. Raises `MissingFieldError` without a conversation.
    """
    items = body.get("input")
    if isinstance(items, str) and items:
        items = [_user(items)]
    if not items:
        raise MissingFieldError(
            "The field 'input' is missing: there is no conversation to compact.", param="input"
        )
    if not isinstance(items, list):
        return []
    # The instruction ends the last user message, or is a new one: some chat templates reject two
    # messages of one role in a row.
    last = items[-1]
    if _role(last) == "user":
        parts = [*_parts(last.get("content")), *_parts(_INSTRUCTION)]
        body["input"] = [*items[:-1], {**last, "content": parts}]
    else:
        body["input"] = [*items, _user(_INSTRUCTION)]
    body["max_output_tokens"] = max_summary_tokens(max_model_len)
    body["temperature"] = 0.0
    return _retained(items)


def compacted(response: JsonObject, retained: list[JsonObject], summary: str) -> JsonObject:
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [*retained, compaction_item(summary)],
        "usage": response["usage"],
    }


def _message(item: JsonObject, path: str) -> JsonObject:
    content = item.get(_CONTENT)
    try:
        if not isinstance(content, str) or not content.startswith(_PREFIX):
            raise ValueError
        found = from_json(base64.b64decode(content[len(_PREFIX) :], altchars=b"-_", validate=True))
        summary = found["summary"]
        if not isinstance(summary, str) or found.keys() != {"summary"}:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, binascii.Error):
        raise InvalidValueError(
            f"'{path}' must be that of a compaction item which this server returned.", param=path
        ) from None
    return {"type": "message", "role": "assistant", "content": _HEADING + summary}


def _user(content: Any) -> JsonObject:
    return {"type": "message", "role": "user", "content": content}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return list(content) if isinstance(content, list) else []


def _role(item: Any) -> str | None:
    """Return the role of a message of the input, None for other items."""
    is_message = isinstance(item, dict) and item.get("type", "message") == "message"
    role = item.get("role") if is_message else None
    return role if isinstance(role, str) else None


def _retained(items: list[Any]) -> list[JsonObject]:
    messages = [item for item in items if _role(item) in _INSTRUCTING_ROLES]
    parts = [p for item in items if _role(item) == "user" for p in _parts(item.get("content"))]
    if parts:
        messages.append(_user(parts))
    return [
        {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "status": "completed",
            "role": message["role"],
            "content": _parts(message.get("content")),
        }
        for message in messages
    ]
