"""Anthropic's API: vLLM's serving class, which takes chats, and messages made of its answers.

Each chunk of a stream is read as plain JSON: vLLM's own converter makes validated models of every
token, and knows neither the ids nor the reasons to stop that clients of this API look for.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json, to_json
from starlette.responses import Response
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError

from server.errors import ContextLengthError
from server.http.streaming import PING
from server.request.options import Tier
from server.request.record import Counts, get_record
from server.tools import is_whole, replace_halves
from server.vllm.errors import TOO_LONG_PARAMETERS
from server.vllm.serving import Chats
from server.wire import JsonObject, named_frame

_DATA = "data:"
_CHAT_ID, _MESSAGE_ID = "chatcmpl-", "msg_"
_CALL_IDS, _TOOL_USE_ID = ("chatcmpl-tool-", "call_"), "toolu_"


class Messages(Chats, AnthropicServingMessages):
    """Takes requests that `server.vllm.reading` made chats of."""

    @classmethod
    def to_chat_completion_request(cls, anthropic_request: Any, **_: Any) -> Any:
        return anthropic_request

    async def create_messages(self, request: Any, raw_request: Any = None) -> Any:
        """Return a message, the frames of its events, or vLLM's error."""
        wanted, record = request.max_tokens, get_record(raw_request.scope)
        tier = (record.tier or Tier.DEFAULT).anthropic
        answer: Any = await self.create_chat_completion(request, raw_request)
        if isinstance(answer, ErrorResponse):
            return answer
        if isinstance(answer, ChatCompletionResponse):
            return Response(to_json(make_message(answer, wanted, tier)))
        return message_events(answer, wanted, record.tokens.of_prefix, tier)

    async def render_chat_request(self, request: Any) -> Any:
        """Render a chat; `max_tokens` is a bound, and need not fit behind the prompt."""
        wanted = request.max_tokens, request.max_completion_tokens
        most = self.model_config.max_model_len - 1
        request.max_tokens = request.max_completion_tokens = None
        try:
            rendered = await super().render_chat_request(request)
        except VLLMValidationError as error:
            if error.parameter not in TOO_LONG_PARAMETERS:
                raise
            raise _too_long(_length(error, self.renderer), most) from error
        finally:
            request.max_tokens, request.max_completion_tokens = wanted
        if not isinstance(rendered, ErrorResponse):
            for prompt in rendered[1]:
                tokens: Any = prompt.get("prompt_token_ids")
                if (length := len(tokens or ())) > most:
                    raise _too_long(str(length), most)
        return rendered


def _length(error: VLLMValidationError, renderer: Any) -> str:
    """Return the number of tokens of a prompt, or the least number that its characters make."""
    size = int(str(error.value))
    if error.parameter == "input_tokens":
        return str(size)
    return f"at least {math.ceil(size / renderer.get_tokenizer().max_chars_per_token)}"


def _too_long(length: str, most: int) -> ContextLengthError:
    # Clients of this API know the error by its first words, and then shorten the conversation.
    return ContextLengthError(
        f"prompt is too long: {length} tokens > {most} maximum, which leaves one for the answer.",
        param="messages",
    )


def make_message(chat: Any, max_tokens: int | None, tier: str) -> JsonObject:
    """Return the message for vLLM's ChatCompletionResponse to a request with `max_tokens`.

    `tier` is Anthropic's name of the request's service tier.
    """
    choice, used = chat.choices[0], chat.usage
    calls = choice.message.tool_calls
    completion = used.completion_tokens or 0
    reason, sequence = get_stop(
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
            **get_usage(used.prompt_tokens, completion, cached, created),
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


def message_id(chat_id: str) -> str:
    """Return a message's id: that of the chat, in this API's manner."""
    return _MESSAGE_ID + chat_id.removeprefix(_CHAT_ID)


def tool_use_id(call_id: str) -> str:
    """Return a call's id in this API's manner; one that the model itself made stays."""
    for prefix in _CALL_IDS:
        if call_id.startswith(prefix):
            return _TOOL_USE_ID + call_id.removeprefix(prefix)
    return call_id


def get_usage(prompt: int, completion: int, cached: int, created: int) -> JsonObject:
    """Return `usage`, in which the prompt's tokens are counted in three parts."""
    return {
        "input_tokens": max(0, prompt - cached - created),
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def get_stop(
    finish: str | None, matched: object, *, calls: bool, complete: bool, room_left: bool
) -> tuple[str, str | None]:
    """Return why a message stopped, and at which of its stop sequences.

    `complete`: the last call's input is complete. `room_left`: fewer tokens than `max_tokens`.
    """
    if finish == "length":
        # A token matched if the model ended inside of its reasoning; the API has no word for it.
        full = room_left and matched is None
        return ("model_context_window_exceeded" if full else "max_tokens"), None
    if finish == "content_filter":
        return "refusal", None
    if calls and complete:
        return "tool_use", None
    if isinstance(matched, str):
        return "stop_sequence", matched
    # The API has no word for a model that ends in the middle of a call.
    return ("max_tokens" if calls else "end_turn"), None


async def message_events(
    chunks: AsyncGenerator[str, None], max_tokens: int | None, prefix: Counts, tier: str
) -> AsyncGenerator[str, None]:
    """Yield a message's events for the frames of a chat that streams its usage.

    `prefix` returns the numbers of prompt tokens read from the prefix cache and written to it.
    """
    message = _Message(max_tokens, prefix, tier)
    async with aclosing(chunks) as stream:
        async for frame in stream:
            data = frame.removeprefix(_DATA).strip()
            events = message.end() if data == "[DONE]" else message.take(from_json(data))
            for event in events:
                yield event


class _Message:
    """One message as it comes; at most one block is open."""

    def __init__(self, max_tokens: int | None, prefix: Counts, tier: str) -> None:
        self._max_tokens = max_tokens
        self._tier = tier
        self._prefix = prefix
        self._begun = False
        self._index = -1
        self._open: str | None = None
        self._call: int | None = None
        self._input = ""
        self._called = False
        # Text between the pieces of a call's input belongs behind the call.
        self._held = ""
        self._finish: str | None = None
        self._matched: object = None
        self._usage: JsonObject = get_usage(0, 0, 0, 0)

    def take(self, chunk: JsonObject) -> Iterator[str]:
        if (usage := chunk.get("usage")) is not None:
            cached, created = self._prefix()
            prompt, completion = usage["prompt_tokens"], usage.get("completion_tokens") or 0
            self._usage = get_usage(prompt, completion, cached, created)
        if not self._begun:
            self._begun = True
            yield self._start(chunk)
            yield PING
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning"):
                if self._open != "thinking":
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                yield self._piece({"type": "thinking_delta", "thinking": thought})
            if text := delta.get("content"):
                if self._open == "tool_use":
                    self._held += text
                else:
                    yield from self._text(text)
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                if function.get("name") and call["index"] != self._call:
                    block = {
                        "type": "tool_use",
                        "id": tool_use_id(call.get("id") or f"{_CALL_IDS[0]}{uuid.uuid4().hex}"),
                        "name": function["name"],
                        "input": {},
                    }
                    yield from self._begin(block)
                    self._call, self._called = call["index"], True
                if (piece := function.get("arguments")) and call["index"] == self._call:
                    self._input += piece
                    yield self._piece({"type": "input_json_delta", "partial_json": piece})
            if choice.get("finish_reason") is not None:
                self._finish, self._matched = choice["finish_reason"], choice.get("stop_reason")

    def end(self) -> Iterator[str]:
        yield from self._close()
        limit = self._max_tokens
        reason, sequence = get_stop(
            self._finish,
            self._matched,
            calls=self._called,
            complete=is_whole(self._input),
            room_left=limit is not None and self._usage["output_tokens"] < limit,
        )
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=self._usage)
        yield _event("message_stop")

    def _start(self, chunk: JsonObject) -> str:
        message = {
            "id": message_id(chunk["id"]),
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": chunk["model"],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage, "service_tier": self._tier},
        }
        return _event("message_start", message=message)

    def _text(self, text: str) -> Iterator[str]:
        if self._open != "text":
            yield from self._begin({"type": "text", "text": ""})
        yield self._piece({"type": "text_delta", "text": text})

    def _begin(self, block: JsonObject) -> Iterator[str]:
        yield from self._close()
        self._index += 1
        self._open, self._input = block["type"], ""
        yield _event("content_block_start", index=self._index, content_block=block)

    def _piece(self, delta: JsonObject) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[str]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._piece({"type": "signature_delta", "signature": uuid.uuid4().hex})
        self._open = None
        yield _event("content_block_stop", index=self._index)
        late_text, self._held = self._held, ""
        if late_text.strip():
            call_input = self._input
            yield from self._text(late_text)
            yield from self._close()
            self._input = call_input


def _event(kind: str, **fields: Any) -> str:
    return named_frame(kind, to_json({"type": kind, **fields}))
