"""Chats: vLLM's serving class, with the engine's finish reasons, and calls of custom tools.

vLLM reports `tool_calls` for every answer with a call, also where a limit cut the call, and `stop`
for an answer that ends inside of its reasoning, without the text or the call that is demanded. It
has functions alone: calls of custom tools are made from its calls of those that replace them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json, to_json
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

from server.structured_outputs.custom_tools import KIND, InputReader, input_of
from server.tools import Ending, finish_reason
from server.vllm.logprobs import UnsentLogprobs, add_bytes, most_likely, placed_entries
from server.vllm.serving import GenerationServing
from server.vllm.tool_requests import demands_answer
from server.wire import JsonObject

_DATA = "data: "
# Parts of a chunk's JSON. No string of it has these quotes without a backslash.
_CALLED = '"finish_reason":"tool_calls"'
_CALLS = '"tool_calls":['
_FINISHED = '"finish_reason":"'


class Chats(GenerationServing, OpenAIServingChat):
    """Reports calls that were cut as such; its parsers are `ObjectCallParser`s."""

    async def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        parsers: list[Any] = []
        serving: Any = copy.copy(self)
        serving.parser_cls = _collecting(self.parser_cls, parsers)
        has_unsent = request.logprobs and request.include_reasoning
        unsent = UnsentLogprobs() if has_unsent else None
        frames = super(Chats, serving).chat_completion_stream_generator(
            request, _with_endings(result_generator, request, parsers, unsent), *args, **kwargs
        )
        named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
        async with aclosing(frames) as stream:
            async for frame in stream:
                if unsent is not None:
                    unsent.note_frame(frame)
                yield _corrected(frame, parsers, named=named) if _CALLED in frame else frame

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        parser, endings = kwargs.get("parser"), list[Ending]()
        results = _read_ahead(result_generator, request, parser, self.enable_auto_tools, endings)
        answer = await super().chat_completion_full_generator(request, results, *args, **kwargs)
        if isinstance(answer, ChatCompletionResponse) and parser is not None:
            named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
            for choice, ending in zip(answer.choices, endings, strict=True):
                if choice.finish_reason == "tool_calls":
                    calls = [call.function.arguments for call in choice.message.tool_calls]
                    choice.finish_reason = finish_reason(ending, calls, named=named)
        return answer

    def _create_chat_logprobs(
        self,
        token_ids: Sequence[int],  # noqa: ARG002 (the positions have them)
        top_logprobs: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        return placed_entries(super()._create_chat_logprobs, top_logprobs, *args, **options)

    def _get_top_logprobs(
        self, logprobs: Any, top_logprobs: int | None, tokenizer: Any, *args: Any, **options: Any
    ) -> Any:
        if not options.get("return_all"):
            logprobs = most_likely(logprobs, top_logprobs)
        entries = super()._get_top_logprobs(logprobs, top_logprobs, tokenizer, *args, **options)
        add_bytes(entries, logprobs, tokenizer)
        return entries


async def read_whole(parser: Any, output: Any, request: Any, result: Any, auto_tools: bool) -> None:
    """Have a parser read a complete answer, in a thread if it was cut."""
    prompt = result.prompt_token_ids or ()
    if Ending.of(output, request).is_cut:
        await asyncio.to_thread(parser.read_whole, output, request, prompt, auto_tools=auto_tools)
    else:
        parser.read_whole(output, request, prompt, auto_tools=auto_tools)


def mark_unfinished(parser: Any, output: Any, request: Any, result: Any) -> None:
    """Give an answer that ended inside of its reasoning the finish reason of one that was cut.

    Only where the request demands more. The stop reason is the token that ended it.
    """
    if output.finish_reason != "stop" or isinstance(output.stop_reason, str):
        return
    if not demands_answer(request):
        return
    if parser.is_thinking_behind(output, request, result.prompt_token_ids or ()):
        output.finish_reason = "length"
        if output.stop_reason is None and output.token_ids:
            output.stop_reason = output.token_ids[-1]


def _collecting(parser: Callable[..., Any] | None, parsers: list[Any]) -> Callable[..., Any] | None:
    """Return a maker of parsers that adds each to a list; None where there are none."""
    if parser is None:
        return None

    def make(*args: Any, **kwargs: Any) -> Any:
        parsers.append(parser(*args, **kwargs))
        return parsers[-1]

    make.tool_parser_cls = parser.tool_parser_cls  # type: ignore[attr-defined]
    return make


async def _with_endings(
    results: Any, request: Any, parsers: list[Any], unsent: UnsentLogprobs | None
) -> AsyncGenerator[Any, None]:
    """Yield the results, and set each answer's ending at the parser of its index before."""
    async with aclosing(results):
        async for result in results:
            if unsent is not None:
                unsent.add_to(result)
            for output in result.outputs if parsers else ():
                if output.finish_reason is not None:
                    parser = parsers[output.index]
                    mark_unfinished(parser, output, request, result)
                    parser.ending = Ending.of(output, request)
            yield result


async def _read_ahead(
    results: Any, request: Any, parser: Any, auto_tools: bool, endings: list[Ending]
) -> AsyncGenerator[Any, None]:
    """Yield the results; the last has been parsed, and its endings are in the list."""
    last = None
    async with aclosing(results):
        async for result in results:
            if last is not None:
                yield last
            last = result
    if last is None:
        return
    for output in last.outputs if parser is not None else ():
        mark_unfinished(parser, output, request, last)
        endings.append(Ending.of(output, request))
        await read_whole(parser, output, request, last, auto_tools)
    yield last


def _corrected(frame: str, parsers: list[Any], *, named: bool) -> str:
    (choice,) = from_json(frame[len(_DATA) :])["choices"]
    parser = parsers[choice["index"]]
    calls = [call.arguments for call in parser.streamed.calls]
    reason = finish_reason(parser.ending, calls, named=named)
    return frame.replace(_CALLED, f'"finish_reason":"{reason}"', 1)


def with_custom_calls(body: bytes, names: Collection[str]) -> bytes:
    """Return a whole chat answer whose calls of the tools `names` are those of custom tools."""
    answer: JsonObject = from_json(body)
    for choice in answer["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls") or []
        for call in calls:
            if call["function"]["name"] in names:
                function = call.pop("function")
                custom = {"name": function["name"], "input": input_of(function["arguments"])}
                call |= {"type": KIND, KIND: custom}
        message["tool_calls"] = calls
    return to_json(answer)


async def custom_call_frames(
    frames: AsyncGenerator[str, None], names: Collection[str]
) -> AsyncGenerator[str, None]:
    """Yield the frames of a streamed chat whose calls of `names` are those of custom tools."""
    stream = _CallStream(names)
    async with aclosing(frames):
        async for frame in frames:
            if frame.startswith(_DATA) and (_CALLS in frame or _FINISHED in frame):
                yield stream.converted(frame)
            else:
                yield frame


class _CallStream:
    """Calls of one stream; keys are the numbers of a choice and of a call in it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._readers: dict[tuple[int, int], InputReader | None] = {}

    def converted(self, frame: str) -> str:
        """Return a frame in which each piece of arguments is one of an input."""
        chunk: JsonObject = from_json(frame[len(_DATA) :].strip())
        for choice in chunk["choices"]:
            delta, number = choice["delta"], choice["index"]
            pieces = [self._piece(number, call) for call in delta.get("tool_calls") or ()]
            if choice.get("finish_reason") is not None:
                pieces += self._rest(number)
            if pieces:
                delta["tool_calls"] = pieces
        return f"{_DATA}{to_json(chunk).decode()}\n\n"

    def _piece(self, number: int, call: Any) -> JsonObject:
        key, function = (number, call["index"]), call.get("function") or {}
        if key not in self._readers:
            custom = function.get("name") in self._names
            self._readers[key] = InputReader() if custom else None
        reader = self._readers[key]
        if reader is None:
            made: JsonObject = call
            return made
        text = {"input": reader.read(function.get("arguments") or "")}
        if function.get("name") is None:
            return {"index": call["index"], KIND: text}
        named = {"name": function["name"], **text}
        return {"index": call["index"], "id": call["id"], "type": KIND, KIND: named}

    def _rest(self, number: int) -> list[JsonObject]:
        rest = [
            (index, reader.end())
            for (choice, index), reader in self._readers.items()
            if choice == number and reader is not None
        ]
        return [{"index": index, KIND: {"input": text}} for index, text in rest if text]
