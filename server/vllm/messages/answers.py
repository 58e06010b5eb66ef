"""A whole chat as a message."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic_core import from_json

from server.tools.ending import is_whole, replace_halves
from server.vllm.messages.events import message_id, stop_of, tool_use_id, usage_of
from server.wire.endpoint import JsonObject


def message_of(chat: Any, max_tokens: int | None, tier: str) -> JsonObject:
    """Return the message for vLLM's ChatCompletionResponse to a request with `max_tokens`.

    `tier` is Anthropic's name of the request's service tier.
    """
    choice, used = chat.choices[0], chat.usage
    calls = choice.message.tool_calls
    completion = used.completion_tokens or 0
    reason, sequence = stop_of(
        choice.finish_reason,
        choice.stop_reason,
        calls=bool(calls),
        complete=all(is_whole(call.function.arguments) for call in calls),
        room_left=max_tokens is not None and completion < max_tokens,
    )
    details = used.prompt_tokens_details
    cached = (details.cached_tokens if details else None) or 0
    created = (details.created_cache_tokens if details else None) or 0
    return {
        "id": message_id(chat.id),
        "type": "message",
        "role": "assistant",
        "model": chat.model,
        "content": _blocks(choice.message),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": {
            **usage_of(used.prompt_tokens, completion, cached, created),
            "service_tier": tier,
        },
    }


def _blocks(message: Any) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    if message.reasoning:
        signature = uuid.uuid4().hex
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {
            "type": "tool_use",
            "id": tool_use_id(call.id),
            "name": call.function.name,
            # Partial arguments if the call was cut, as the stop reason shows.
            "input": from_json(replace_halves(call.function.arguments or "{}"), allow_partial=True),
        }
        for call in message.tool_calls
    ]
    # Clients of this API read the first block without checking that it exists.
    return blocks or [{"type": "text", "text": ""}]
