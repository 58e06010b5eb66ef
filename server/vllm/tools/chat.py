"""vLLM's serving class of chats, whose finish reasons are those of the engine.

vLLM reports `tool_calls` for every answer with a call, also where a limit cut the call, and `stop`
for an answer that ends inside of its reasoning, without the text or the call that is demanded.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import cache
from typing import Any

from pydantic_core import from_json

from server.tools.ending import Ending, finish_reason
from server.vllm.tools.requests import demands_answer

_CALLED = '"finish_reason":"tool_calls"'
"""In a chunk's JSON. No string of it has these quotes without a backslash."""
_DATA = "data:"


@cache
def chats_with_cut_calls() -> type:
    """Return the class, which cannot be made before vLLM's serving modules are imported."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionNamedToolChoiceParam,
        ChatCompletionResponse,
    )
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    class ChatsWithCutCalls(OpenAIServingChat):
        """Reports calls that were cut as such; its parsers are `ObjectCallParser`s."""

        async def chat_completion_stream_generator(
            self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
        ) -> AsyncGenerator[str, None]:
            """Yield the frames of a streamed answer."""
            parsers: list[Any] = []
            serving: Any = copy.copy(self)
            serving.parser_cls = _collecting(self.parser_cls, parsers)
            frames = super(ChatsWithCutCalls, serving).chat_completion_stream_generator(
                request, _with_endings(result_generator, request, parsers), *args, **kwargs
            )
            named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
            async with aclosing(frames) as stream:
                async for frame in stream:
                    yield _corrected(frame, parsers, named=named) if _CALLED in frame else frame

        async def chat_completion_full_generator(
            self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
        ) -> Any:
            """Return a whole answer."""
            parser, endings = kwargs.get("parser"), list[Ending]()
            results = _read_ahead(
                result_generator, request, parser, self.enable_auto_tools, endings
            )
            answer = await super().chat_completion_full_generator(request, results, *args, **kwargs)
            if isinstance(answer, ChatCompletionResponse) and parser is not None:
                named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
                for choice, ending in zip(answer.choices, endings, strict=True):
                    if choice.finish_reason == "tool_calls":
                        calls = [call.function.arguments for call in choice.message.tool_calls]
                        choice.finish_reason = finish_reason(ending, calls, named=named)
            return answer

    return ChatsWithCutCalls


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
    results: Any, request: Any, parsers: list[Any]
) -> AsyncGenerator[Any, None]:
    """Yield the results, and set each answer's ending at the parser of its index before."""
    async with aclosing(results):
        async for result in results:
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
    (choice,) = from_json(frame.removeprefix(_DATA))["choices"]
    parser = parsers[choice["index"]]
    calls = [call.arguments for call in parser.streamed.calls]
    reason = finish_reason(parser.ending, calls, named=named)
    return frame.replace(_CALLED, f'"finish_reason":"{reason}"', 1)
