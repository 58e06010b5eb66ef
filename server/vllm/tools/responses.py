"""vLLM's serving class of responses, whose status says whether they were cut."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from typing import Any

from openai.types.responses.response import IncompleteDetails

from server.tools.ending import Ending, is_whole
from server.vllm.tools.chat import mark_unfinished, read_whole

_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""The reasons that OpenAI has for an incomplete response, by finish reason."""


@cache
def responses_with_cut_calls() -> type:
    """Return the class, which cannot be made before vLLM's serving modules are imported."""
    from vllm.entrypoints.openai.responses.context import SimpleContext
    from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    class ResponsesWithCutCalls(OpenAIServingResponses):
        """Reports responses that were cut as `incomplete`; its parsers are `ObjectCallParser`s."""

        def _process_simple_streaming_events(
            self,
            request: Any,
            sampling_params: Any,
            result_generator: Any,
            context: Any,
            model_name: str,
            tokenizer: Any,
            request_metadata: Any,
            created_time: int,
            _increment_sequence_number_and_return: Any,
        ) -> AsyncGenerator[Any, None]:
            return super()._process_simple_streaming_events(
                request,
                sampling_params,
                _with_endings(result_generator, request),
                context,
                model_name,
                tokenizer,
                request_metadata,
                created_time,
                _increment_sequence_number_and_return,
            )

        async def responses_full_generator(
            self,
            request: Any,
            sampling_params: Any,
            result_generator: Any,
            context: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            """Return a whole response, or the last state of a streamed one."""
            simple = isinstance(context, SimpleContext)
            if simple and context.response_parser is not None:
                result_generator = _read_ahead(result_generator, request, self.enable_auto_tools)
            answer = await super().responses_full_generator(
                request, sampling_params, result_generator, context, *args, **kwargs
            )
            if simple and isinstance(answer, ResponsesResponse):
                _settle(answer, Ending.of(context.last_output.outputs[0], request))
            return answer

    return ResponsesWithCutCalls


async def _with_endings(contexts: Any, request: Any) -> AsyncGenerator[Any, None]:
    """Yield the contexts; the parser has the ending before the last delta."""
    async with aclosing(contexts):
        async for context in contexts:
            ended = _ended(context)
            if ended is not None and context.response_parser is not None:
                mark_unfinished(context.response_parser, ended, request, context.last_output)
                context.response_parser.ending = Ending.of(ended, request)
            yield context


async def _read_ahead(contexts: Any, request: Any, auto_tools: bool) -> AsyncGenerator[Any, None]:
    """Yield the contexts; what the last one has was parsed."""
    async with aclosing(contexts):
        async for context in contexts:
            ended, result = _ended(context), context.last_output
            if ended is not None:
                mark_unfinished(context.response_parser, ended, request, result)
                await read_whole(context.response_parser, ended, request, result, auto_tools)
            yield context


def _ended(context: Any) -> Any:
    """Return the output of a context that is finished; None before."""
    outputs = context.last_output.outputs
    return outputs[0] if outputs and outputs[0].finish_reason is not None else None


def _settle(answer: Any, ending: Ending) -> None:
    """Set the status of a response, which that of its last item follows."""
    calls = [item for item in answer.output[-1:] if item.type == "function_call"]
    if ending.reason != "stop" or not all(is_whole(call.arguments) for call in calls):
        answer.status = "incomplete"
        reason: Any = _REASONS.get(ending.reason)
        answer.incomplete_details = None if reason is None else IncompleteDetails(reason=reason)
