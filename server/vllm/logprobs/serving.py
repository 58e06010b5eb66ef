"""Mixins of vLLM's serving classes: log-probabilities with the bytes and places of tokens.

`top_logprobs` are the most likely tokens of each position. An entry has the bytes of its own token,
which for a part of a character is no text. The token that ends an answer has no entry.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from functools import cache
from typing import TYPE_CHECKING, Any

from server.vllm.logprobs.processor import PlacedLogprob
from server.vllm.logprobs.texts import text_starts, token_bytes, token_texts

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

_CHOICE = re.compile(r'"choices":\[\{"index":(\d+)')
_HAS_LOGPROBS = '"logprobs":{'
"""In a chunk's JSON. No string of it has these quotes without a backslash."""


class LikelyInChats:
    """For chats."""

    def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        """Return the frames of a streamed answer."""
        if not request.logprobs or not request.include_reasoning:
            return super().chat_completion_stream_generator(  # type: ignore[misc,no-any-return]
                request, result_generator, *args, **kwargs
            )
        unsent = _Unsent()
        frames = super().chat_completion_stream_generator(  # type: ignore[misc]
            request, unsent.added_to(result_generator), *args, **kwargs
        )
        return unsent.noting(frames)

    def _create_chat_logprobs(
        self, token_ids: Sequence[int], top_logprobs: Any, *args: Any, **options: Any
    ) -> Any:
        del token_ids
        shown = shown_positions(top_logprobs)
        made = super()._create_chat_logprobs(  # type: ignore[misc]
            [token for token, _ in shown], [position for _, position in shown], *args, **options
        )
        for entry, (token, position) in zip(made.content, shown, strict=True):
            entry.bytes = list(position[token].text_bytes)
        return made

    def _get_top_logprobs(
        self, logprobs: Any, top_logprobs: int | None, tokenizer: Any, *args: Any, **options: Any
    ) -> Any:
        if not options.get("return_all"):
            logprobs = _most_likely(logprobs, top_logprobs)
        made = super()._get_top_logprobs(  # type: ignore[misc]
            logprobs, top_logprobs, tokenizer, *args, **options
        )
        _add_bytes(made, logprobs, tokenizer)
        return made


class _Unsent:
    """Log-probabilities of steps without a chunk, which the answer's next chunk has.

    vLLM sends none for a step whose text its parser holds back.
    """

    def __init__(self) -> None:
        self._positions: dict[int, list[Any]] = {}

    def _add_to(self, result: Any) -> None:
        for output in result.outputs:
            positions = [*self._positions.get(output.index, ()), *(output.logprobs or ())]
            self._positions[output.index] = output.logprobs = positions

    async def added_to(self, results: Any) -> AsyncGenerator[Any, None]:
        """Yield vLLM's results with the positions of earlier ones that were not sent."""
        async with aclosing(results):
            async for result in results:
                self._add_to(result)
                yield result

    async def noting(self, frames: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Yield a chat's frames, and forget what they have sent."""
        async with aclosing(frames):
            async for frame in frames:
                if _HAS_LOGPROBS in frame and (index := _CHOICE.search(frame)) is not None:
                    self._positions.pop(int(index[1]), None)
                yield frame

    async def added_to_contexts(self, contexts: Any) -> AsyncGenerator[Any, None]:
        """Yield the contexts of a response; their last results are as those of `added_to`."""
        async with aclosing(contexts):
            async for context in contexts:
                self._add_to(context.last_output)
                yield context

    async def noting_deltas(self, events: Any) -> AsyncGenerator[Any, None]:
        """Yield a response's events, and forget what deltas have sent."""
        follows = False
        async with aclosing(events):
            async for event in events:
                if event.type == "response.output_item.added":
                    follows = event.output_index > 0
                elif event.type.endswith(".delta"):
                    if follows and event.type == "response.output_text.delta":
                        # The end of the reasoning before it was held back, too.
                        event.logprobs = _last_of(event.logprobs, len(event.delta.encode()))
                    follows = False
                    self._positions.clear()
                yield event


def _last_of(entries: list[Any], size: int) -> list[Any]:
    """Return the last entries, as many as have `size` bytes."""
    begin = len(entries)
    while begin and size > 0:
        begin -= 1
        size -= len(entries[begin].bytes)
    return entries[begin:]


class LikelyInResponses:
    """For the Responses API."""

    def _process_simple_streaming_events(
        self, request: Any, sampling_params: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not request.is_include_output_logprobs():
            return super()._process_simple_streaming_events(  # type: ignore[misc]
                request, sampling_params, result_generator, *args, **kwargs
            )
        unsent = _Unsent()
        events = super()._process_simple_streaming_events(  # type: ignore[misc]
            request, sampling_params, unsent.added_to_contexts(result_generator), *args, **kwargs
        )
        return unsent.noting_deltas(events)

    def _create_response_logprobs(
        self, token_ids: Sequence[int], logprobs: Any, *args: Any, **options: Any
    ) -> Any:
        del token_ids
        shown = shown_positions(logprobs)
        made = super()._create_response_logprobs(  # type: ignore[misc]
            [token for token, _ in shown], [position for _, position in shown], *args, **options
        )
        for entry, (token, position) in zip(made, shown, strict=True):
            entry.bytes = list(position[token].text_bytes)
        return made

    def _create_stream_response_logprobs(self, *args: Any, **options: Any) -> Any:
        from openai.types.responses.response_text_delta_event import Logprob

        # With the bytes, which vLLM leaves out of streams.
        made = self._create_response_logprobs(*args, **options)
        return [Logprob.model_validate(entry.model_dump()) for entry in made]

    def _topk_logprobs(self, logprobs: Any, top_logprobs: int, tokenizer: Any) -> Any:
        likely = _most_likely(logprobs, top_logprobs)
        made = super()._topk_logprobs(  # type: ignore[misc]
            likely, top_logprobs=top_logprobs, tokenizer=tokenizer
        )
        _add_bytes(made, likely, tokenizer)
        return made


def shown_positions(positions: Any) -> list[tuple[int, Any]]:
    """Return the positions that have an entry, each with the token that was sampled."""
    sampled = ((next(iter(position)), position) for position in positions)
    return [(token, one) for token, one in sampled if one[token].text_bytes is not None]


def _add_bytes(entries: Any, tokens: Iterable[int], tokenizer: Any) -> None:
    """Set the bytes of alternatives, those of their tokens."""
    for entry, token in zip(entries, tokens, strict=False):
        entry.bytes = list(token_bytes(tokenizer).of(token))


def _most_likely(logprobs: dict[int, Any], number: int | None) -> dict[int, Any]:
    """Return the `number` most likely tokens of a position, the likeliest first; -1: all.

    vLLM puts the sampled token in front of them, and counts it among them.
    """
    if number is None or number < 0:
        return logprobs
    ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)
    return dict(ranked[:number])


@cache
def placing_beams() -> type:
    """Return the class, which cannot be made before vLLM's serving modules are imported."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    class PlacesBeams(GenerateBaseServing):
        """Places the tokens of beams in their texts."""

        async def beam_search(
            self, prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            """Yield the result of a beam search."""
            results = super().beam_search(prompt, request_id, params, *args, **kwargs)
            async with aclosing(results):
                async for result in results:
                    for output in result.outputs:
                        _place_beam(
                            output, self.renderer.tokenizer, skips=params.skip_special_tokens
                        )
                    yield result

    return PlacesBeams


def _place_beam(output: CompletionOutput, tokenizer: Any, *, skips: bool) -> None:
    """Place the tokens of a beam; its positions are shared with others and lack texts."""
    own = token_bytes(tokenizer)
    pieces = [own.of(token, skip_special_tokens=skips) for token in output.token_ids]
    starts = text_starts(pieces)
    positions: Any = output.logprobs or ()
    placed: list[Any] = []
    for index, (token, position) in enumerate(zip(output.token_ids, positions, strict=False)):
        texts = token_texts(tokenizer, list(position))
        known = {
            other: PlacedLogprob(one.logprob, one.rank, text)
            for (other, one), text in zip(position.items(), texts, strict=True)
        }
        chosen = known.pop(token)
        chosen.text_offset, chosen.text_bytes = starts[index], pieces[index]
        placed.append({token: chosen, **known})
    output.logprobs = placed
