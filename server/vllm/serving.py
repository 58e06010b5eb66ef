"""vLLM's serving instances: requests come in as they were read, errors leave as exceptions.

Upstream writes an error of a stream into a frame, which loses its class. Here
the exception itself is raised, and `server.vllm.errors` alone translates it for clients.
"""

from __future__ import annotations

import copy
from functools import cache
from http import HTTPStatus
from typing import Any, NoReturn, TypeVar

from server.vllm.errors import RefusedError
from server.vllm.logprobs.serving import late_chats, late_completions, late_responses
from server.vllm.messages.serving import over_chat_requests
from server.vllm.responses.serving import counting
from server.vllm.tools.chat import chats_with_cut_calls
from server.vllm.tools.parser import object_call_parser
from server.vllm.tools.responses import responses_with_cut_calls

_Serving = TypeVar("_Serving")


@cache
def _raises_in_streams() -> type:
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    class RaisesInStreams(GenerateBaseServing):
        """Raises what vLLM's generators ask it to write into a stream."""

        def create_streaming_error_response(
            self,
            message: str | Exception,
            err_type: str = "",  # noqa: ARG002 (the status says as much)
            status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
            param: str | None = None,
        ) -> NoReturn:
            """Raise the exception, or a `RefusedError` where there are only words."""
            if isinstance(message, Exception):
                raise message
            raise RefusedError(message, status_code, param)

        def _convert_generation_error_to_streaming_response(self, e: Exception) -> NoReturn:
            raise e

    return RaisesInStreams


class NoLengthCheck:
    """Mixin that skips the prompt length check of vLLM's Responses class.

    `EngineClient` makes the check for every endpoint, with one message.
    """

    def _validate_generator_input(self, _engine_input: Any) -> None:
        return None


def adapted(serving: _Serving) -> _Serving:
    """Return a copy of `serving` that raises in streams, takes requests as they were read, and
    knows a call of a tool by its object.

    What pools has no streams, and stays what it is.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    ours: tuple[type, ...] = ()
    if isinstance(serving, OpenAIServingChat):
        ours += (late_chats(), chats_with_cut_calls())
    if isinstance(serving, OpenAIServingCompletion):
        ours += (late_completions(),)
    if isinstance(serving, OpenAIServingResponses):
        ours += (late_responses(), NoLengthCheck, counting(), responses_with_cut_calls())
    if isinstance(serving, GenerateBaseServing):
        ours += (_raises_in_streams(),)
    if isinstance(serving, AnthropicServingMessages):
        ours += (over_chat_requests(),)
    made = copy.copy(serving)
    made.__class__ = type(type(serving).__name__, (*ours, type(serving)), {})
    _hold_to_objects(made)
    return made


def _hold_to_objects(serving: Any) -> None:
    """Give a copy of a serving instance, and its renderer, our parser of answers."""
    for owner, name in ((serving, "parser_cls"), (serving, "parser")):
        if hasattr(owner, name):
            setattr(owner, name, object_call_parser(getattr(owner, name)))
    if hasattr(serving, "online_renderer"):
        serving.online_renderer = copy.copy(serving.online_renderer)
        serving.online_renderer.parser = object_call_parser(serving.online_renderer.parser)
