"""vLLM's serving instances with mixins: errors of streams are raised, calls have our parser.

vLLM writes an error of a stream into a frame, which loses its class. Here the exception is raised,
and `server.vllm.errors` alone translates it for clients.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from server.request.record import record_var
from server.vllm.errors import RefusedError
from server.vllm.logprobs.completions import completions_in_place
from server.vllm.logprobs.serving import LikelyInChats, LikelyInResponses, placing_beams
from server.vllm.messages.serving import over_chat_requests
from server.vllm.rendering.serving import answering_renders
from server.vllm.responses.serving import counting
from server.vllm.tools.chat import chats_with_cut_calls
from server.vllm.tools.parser import object_call_parser
from server.vllm.tools.responses import responses_with_cut_calls

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

_Serving = TypeVar("_Serving")


@cache
def _raises_in_streams() -> type:
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    class RaisesInStreams(GenerateBaseServing):
        """Raises the errors that vLLM's generators would write into a stream."""

        def create_streaming_error_response(
            self,
            message: str | Exception,
            err_type: str = "",  # noqa: ARG002 (the status says as much)
            status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
            param: str | None = None,
        ) -> NoReturn:
            """Raise the exception, or a `RefusedError` for a message."""
            if isinstance(message, Exception):
                raise message
            raise RefusedError(message, status_code, param)

        def _convert_generation_error_to_streaming_response(self, e: Exception) -> NoReturn:
            raise e

        async def beam_search(
            self, prompt: Any, request_id: str, params: Any, *args: Any, **options: Any
        ) -> AsyncGenerator[RequestOutput, None]:
            """Search as vLLM does; the request uses the tokens of its answer's `usage`.

            The engine's requests, one for each beam and token, are no part of it.
            """
            used = [len(prompt.get("prompt_token_ids", ())), 0]
            record = record_var.get()
            if record is not None:
                record.reserve(used[0] + params.beam_width * params.max_tokens)
                record.tokens.used.append(lambda: (used[0], used[1]))
            beams = super().beam_search(prompt, request_id, params, *args, **options)
            async with aclosing(beams) as outputs:
                async for output in outputs:
                    used[1] = sum(len(answer.token_ids) for answer in output.outputs)
                    yield output

    return RaisesInStreams


def adapted(serving: _Serving) -> _Serving:
    """Return a copy of `serving` with the mixins of its class and our parser of calls.

    Serving classes of pooling models have no streams and stay unchanged.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.scale_out.render.serving import ServingRender

    ours: tuple[type, ...] = ()
    if isinstance(serving, OpenAIServingChat):
        ours += (LikelyInChats, chats_with_cut_calls())
    if isinstance(serving, OpenAIServingCompletion):
        ours += (completions_in_place(),)
    if isinstance(serving, OpenAIServingResponses):
        ours += (LikelyInResponses, counting(), responses_with_cut_calls())
    if isinstance(serving, GenerateBaseServing):
        ours += (_raises_in_streams(), placing_beams())
    if isinstance(serving, AnthropicServingMessages):
        ours += (over_chat_requests(),)
    if isinstance(serving, ServingRender):
        ours += (answering_renders(),)
    made = copy.copy(serving)
    made.__class__ = type(type(serving).__name__, (*ours, type(serving)), {})
    _hold_to_objects(made)
    return made


def _hold_to_objects(serving: Any) -> None:
    """Set our parser of answers in a copy of a serving instance and in its renderer."""
    for owner, name in ((serving, "parser_cls"), (serving, "parser")):
        if hasattr(owner, name):
            setattr(owner, name, object_call_parser(getattr(owner, name)))
    if hasattr(serving, "online_renderer"):
        serving.online_renderer = copy.copy(serving.online_renderer)
        serving.online_renderer.parser = object_call_parser(serving.online_renderer.parser)
