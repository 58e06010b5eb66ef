"""Mixins of vLLM's serving classes: they defer large logprobs and return `top_logprobs` of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from pydantic_core import to_json

from server.vllm.logprobs.late import SMALL_ENTRIES, late_var, marker
from server.vllm.logprobs.prompt import Position, resolved

_LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
"""The fields of a completion's logprobs, each with an entry for every token."""


@cache
def late_chats() -> type:
    """Return the mixin for chats; made once vLLM's modules are imported."""
    from vllm.entrypoints.openai.chat_completion import protocol

    class LateChats:
        """Defers the logprobs of long answers."""

        def _create_chat_logprobs(
            self, token_ids: Sequence[int], top_logprobs: Sequence[Any], **options: Any
        ) -> Any:
            make = partial(super()._create_chat_logprobs, **options)  # type: ignore[misc]
            parts = late_var.get()
            if parts is None or _is_small(top_logprobs):
                return make(token_ids=token_ids, top_logprobs=top_logprobs)
            token = protocol.ChatCompletionLogProbsContent(
                token=str(marker()), logprob=0.0, bytes=[], top_logprobs=[]
            )
            stand_in = protocol.ChatCompletionLogProbs(content=[token])
            build = partial(_chat_json, make, token_ids, top_logprobs)
            parts.add(stand_in.model_dump_json(), build)
            return stand_in

        def _get_top_logprobs(
            self, logprobs: Any, top_logprobs: int | None, *args: Any, **options: Any
        ) -> Any:
            if not options.get("return_all"):
                logprobs = _most_likely(logprobs, top_logprobs)
            return super()._get_top_logprobs(  # type: ignore[misc]
                logprobs, top_logprobs, *args, **options
            )

    return LateChats


@cache
def late_completions() -> type:
    """Return the mixin for completions; made once vLLM's modules are imported."""
    from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

    class LateCompletions:
        """Defers the logprobs of prompts and long answers."""

        def _create_completion_logprobs(
            self, token_ids: Sequence[int], top_logprobs: Sequence[Any], **options: Any
        ) -> Any:
            make = partial(super()._create_completion_logprobs, **options)  # type: ignore[misc]
            parts = late_var.get()
            if parts is None or _is_small(top_logprobs):
                return make(token_ids=token_ids, top_logprobs=top_logprobs)
            stand_in = CompletionLogProbs(
                text_offset=[], token_logprobs=[], tokens=[str(marker())], top_logprobs=[]
            )
            begin = options.get("initial_text_offset", 0)
            build = partial(_completion_json, make, token_ids, top_logprobs, begin)
            parts.add(stand_in.model_dump_json(), build)
            return stand_in

    return LateCompletions


@cache
def late_responses() -> type:
    """Return the mixin for the Responses API; made once vLLM's modules are imported."""
    from openai.types.responses.response_output_text import Logprob

    class LateResponses:
        """Defers the logprobs of long answers."""

        def _create_response_logprobs(
            self, token_ids: Sequence[int], logprobs: Sequence[Any], **options: Any
        ) -> list[Any]:
            make = partial(super()._create_response_logprobs, **options)  # type: ignore[misc]
            parts = late_var.get()
            if parts is None or _is_small(logprobs):
                return make(token_ids=token_ids, logprobs=logprobs)  # type: ignore[no-any-return]
            stand_in = Logprob(token=str(marker()), bytes=[], logprob=0.0, top_logprobs=[])
            parts.add(
                stand_in.model_dump_json(), partial(_response_json, make, token_ids, logprobs)
            )
            return [stand_in]

        def _topk_logprobs(self, logprobs: Any, top_logprobs: int, tokenizer: Any) -> Any:
            likely = _most_likely(logprobs, top_logprobs)
            return super()._topk_logprobs(  # type: ignore[misc]
                likely, top_logprobs=top_logprobs, tokenizer=tokenizer
            )

    return LateResponses


def _most_likely(logprobs: dict[int, Any], number: int | None) -> dict[int, Any]:
    """Return the `number` most likely tokens of a position, the likeliest first; -1: all.

    vLLM puts the sampled token in front of them, and counts it among them.
    """
    if number is None or number < 0:
        return logprobs
    ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)
    return dict(ranked[:number])


def _is_small(positions: Sequence[Any]) -> bool:
    entries = 0
    for position in positions:
        if isinstance(position, Position):
            return False
        entries += len(position or ())
    return entries <= SMALL_ENTRIES


def _chat_json(make: Any, token_ids: Sequence[int], positions: Sequence[Any]) -> str:
    """Return the JSON of a chat's logprobs, made a slice at a time."""
    head, tail = '{"content":[', "]}"
    parts, begin = [], 0
    for logprobs in resolved(positions):
        made = make(token_ids=token_ids[begin : begin + len(logprobs)], top_logprobs=logprobs)
        parts.append(made.model_dump_json().removeprefix(head).removesuffix(tail))
        begin += len(logprobs)
    return head + ",".join(parts) + tail


def _response_json(make: Any, token_ids: Sequence[int], positions: Sequence[Any]) -> str:
    """Return the JSON of a response's logprobs without brackets, made a slice at a time."""
    parts, begin = [], 0
    for logprobs in resolved(positions):
        made = make(token_ids=token_ids[begin : begin + len(logprobs)], logprobs=logprobs)
        parts += [logprob.model_dump_json() for logprob in made]
        begin += len(logprobs)
    return ",".join(parts)


def _completion_json(
    make: Any, token_ids: Sequence[int], positions: Sequence[Any], offset: int
) -> str:
    """Return the JSON of a completion's logprobs, made a slice at a time."""
    lists: dict[str, list[bytes]] = {name: [] for name in _LISTS}
    begin = 0
    for logprobs in resolved(positions):
        made = make(
            token_ids=token_ids[begin : begin + len(logprobs)],
            top_logprobs=logprobs,
            initial_text_offset=offset,
        )
        for name, parts in lists.items():
            parts.append(to_json(getattr(made, name), inf_nan_mode="null")[1:-1])
        offset = made.text_offset[-1] + len(made.tokens[-1])
        begin += len(logprobs)
    whole = (f'"{name}":[{b",".join(parts).decode()}]' for name, parts in lists.items())
    return "{" + ",".join(whole) + "}"
