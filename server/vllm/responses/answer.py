"""A response as clients see it, made from vLLM's."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from pydantic_core import to_json

from server.errors import InternalError
from server.request.record import RequestRecord
from server.storage.responses.compaction import compacted, compaction_item
from server.tools.ending import is_whole
from server.vllm.responses.items import custom_call
from server.wire.endpoint import JsonObject

_VLLM_FIELDS = (
    *("kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages"),
    "prompt",
)
"""Fields of vLLM's own, shown if they have a value."""
_PER_TURN = "_per_turn"


def response_json(answer: Any, stamp: JsonObject, record: RequestRecord) -> bytes:
    """Return the body for vLLM's `ResponsesResponse`; `stamp` are additional fields."""
    response = response_of(answer, stamp, record)
    if record.compacts:
        return to_json(with_summary(response))
    is_cut = response["status"] == "incomplete"
    last = len(response["output"]) - 1
    response["output"] = [
        _item(item, record.custom_tools, is_cut=is_cut and place == last)
        for place, item in enumerate(response["output"])
    ]
    return to_json(response)


def compacted_json(answer: Any, stamp: JsonObject, record: RequestRecord) -> bytes:
    """Return the body for vLLM's `ResponsesResponse` that summarises a conversation.

    `stamp["output"]` has the messages that stay. Raises `InternalError` for an empty summary.
    """
    response = response_of(answer, {}, record)
    return to_json(compacted(response, stamp["output"], _summary_of(response)))


def with_summary(response: JsonObject) -> JsonObject:
    """Return a response whose one item has its text as a summary, whole at any length.

    Raises `InternalError` for an empty summary.
    """
    ended = {"status": "completed", "incomplete_details": None, "completed_at": int(time.time())}
    return {**response, **ended, "output": [compaction_item(_summary_of(response))]}


def _summary_of(response: JsonObject) -> str:
    summary = _text_of(response["output"])
    if not summary:
        raise InternalError("The model returned no summary of the conversation; it is unchanged.")
    return summary


def response_of(answer: Any, stamp: JsonObject, record: RequestRecord | None) -> JsonObject:
    """Return vLLM's `ResponsesResponse` with OpenAI's fields; its items are vLLM's."""
    found: JsonObject = answer.model_dump(mode="json", by_alias=True)
    for name in _VLLM_FIELDS:
        if found[name] is None:
            del found[name]
    ended = found["status"] == "completed"
    found["completed_at"] = int(time.time()) if ended else None
    found["error"] = None
    if found["usage"] is not None:
        found["usage"] = _usage(found["usage"], record)
    return found | stamp


def _text_of(output: list[JsonObject]) -> str:
    """Return the text of the messages, or of reasoning that took all tokens."""
    texts = {"message": "", "reasoning": ""}
    for item in output:
        if item["type"] in texts:
            texts[item["type"]] += "".join(part["text"] for part in item["content"] or ())
    return (texts["message"] or texts["reasoning"]).strip()


def _usage(usage: JsonObject, record: RequestRecord | None) -> JsonObject:
    """Return OpenAI's usage; vLLM's lists of turns stay where there are several."""
    _, written = (0, 0) if record is None else record.tokens.of_prefix()
    details = _without_empty_turns(usage["input_tokens_details"])
    return {
        **usage,
        "input_tokens_details": {**details, "cache_write_tokens": written},
        "output_tokens_details": _without_empty_turns(usage["output_tokens_details"]),
    }


def _without_empty_turns(details: JsonObject) -> JsonObject:
    return {k: v for k, v in details.items() if v or not k.endswith(_PER_TURN)}


def _item(item: JsonObject, custom_tools: Collection[str], *, is_cut: bool) -> JsonObject:
    """Return an item without the optional fields that it does not use."""
    item = {name: value for name, value in item.items() if value is not None}
    kind = item["type"]
    if kind == "message":
        parts = item["content"] or [{"type": "output_text", "text": "", "annotations": []}]
        item["content"] = [{**part, "logprobs": part.get("logprobs") or []} for part in parts]
    elif kind == "function_call":
        is_cut = is_cut and not is_whole(item["arguments"])
        if item["name"] in custom_tools:
            item = custom_call(item)
    elif kind != "reasoning":
        return item
    return {**item, "status": "incomplete" if is_cut else "completed"}
