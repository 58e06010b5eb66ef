"""Compaction of a conversation: the request that summarises it, and the item that has the summary.

The item is plain text in an encoding, not encrypted: whoever sends it back may send any text as an
assistant's message, which is what it becomes. It is checked like every other input
(docs/decisions/0068-compaction-items-carry-their-summary.md).
"""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Any

from pydantic_core import from_json, to_json

from server.errors import InvalidValueError, MissingFieldError
from server.frontend import JsonObject

COMPACTION = "compaction"
MAX_SUMMARY_TOKENS = 1024
_CONTEXT_SHARE = 8
"""A summary may have one in so many tokens of the context, if that is less."""
_INSTRUCTION = (
    "Summarise the conversation above so that it can go on from the summary alone. Keep every "
    "fact, decision, name and number that later turns may need, what was done, and what is still "
    "to do. Answer with the summary only."
)
_HEADING = "Summary of the conversation so far:\n"
_PREFIX = "rbln1."
"""Tells items of this server, and their version, from those of others."""
_CONTENT = "encrypted_content"
_INSTRUCTING_ROLES = ("system", "developer")


def max_summary_tokens(max_model_len: int) -> int:
    """Return how many tokens a summary may have."""
    return max(1, min(MAX_SUMMARY_TOKENS, max_model_len // _CONTEXT_SHARE))


def compaction_item(summary: str) -> JsonObject:
    """Return the item that stands for a conversation in later requests."""
    text = base64.urlsafe_b64encode(to_json({"summary": summary})).decode()
    return {"id": f"cmp_{uuid.uuid4().hex}", "type": COMPACTION, _CONTENT: _PREFIX + text}


def expand_compactions(body: JsonObject) -> None:
    """Put the messages that they stand for in the place of compaction items of `input`.

    Raises `InvalidValueError` for an item that this server did not make.
    """
    items = body.get("input")
    if not isinstance(items, list):
        return
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == COMPACTION:
            items[index] = _message(item, f"input[{index}].{_CONTENT}")


def summarise(body: JsonObject, max_model_len: int) -> list[JsonObject]:
    """Make of a body that asks for a compaction one that asks for the summary.

    Returns the messages that stay as they are: those that instruct, then the user's as one.
    Raises `MissingFieldError` where there is no conversation.
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
    body["input"] = _with_instruction(items)
    body["max_output_tokens"] = max_summary_tokens(max_model_len)
    body["temperature"] = 0.0
    return _kept(items)


def compacted(response: JsonObject, kept: list[JsonObject], summary: str) -> JsonObject:
    """Return the object for the response that has the summary."""
    return {
        "id": response["id"],
        "object": "response.compaction",
        "created_at": response["created_at"],
        "output": [*kept, compaction_item(summary)],
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
    """Return the role of a message that a client wrote, None for everything else."""
    is_message = isinstance(item, dict) and item.get("type", "message") == "message"
    role = item.get("role") if is_message else None
    return role if isinstance(role, str) else None


def _with_instruction(items: list[Any]) -> list[Any]:
    """Return a conversation that ends with the instruction, in the user's turn.

    Some chat templates allow no two turns of one role in a row.
    """
    last = items[-1]
    if _role(last) != "user":
        return [*items, _user(_INSTRUCTION)]
    parts = [*_parts(last.get("content")), *_parts(_INSTRUCTION)]
    return [*items[:-1], {**last, "content": parts}]


def _kept(items: list[Any]) -> list[JsonObject]:
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
