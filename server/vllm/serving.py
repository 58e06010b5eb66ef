"""vLLM's serving instances: requests come in as they were read, errors leave as exceptions.

Upstream writes an error of a stream into a frame, from which nobody can tell what happened. Here
it is raised as the object that it is, and `server.vllm.errors` alone says what a client is told.
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from http import HTTPStatus
from typing import Any, NoReturn, TypeVar

from server.vllm.errors import RefusedError

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


@cache
def _over_chat_requests() -> type:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    class OverChatRequests(AnthropicServingMessages):
        """Takes requests of Anthropic's API that `server.vllm.messages` has made chats of."""

        @classmethod
        def to_chat_completion_request(cls, anthropic_request: Any, **_: Any) -> Any:
            """Return a request as it is."""
            return anthropic_request

    return OverChatRequests


def adapted(serving: _Serving) -> _Serving:
    """Return a copy of `serving` that raises in streams and takes requests as they were read.

    What pools has no streams, and stays what it is.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    ours: tuple[type, ...] = ()
    if isinstance(serving, GenerateBaseServing):
        ours += (_raises_in_streams(),)
    if isinstance(serving, AnthropicServingMessages):
        ours += (_over_chat_requests(),)
    made = copy.copy(serving)
    made.__class__ = type(type(serving).__name__, (*ours, type(serving)), {})
    return made


def raise_in_messages() -> None:
    """Let the stream of Anthropic's API raise what it would tell, too; idempotent.

    Its converter has no method for that: its module makes an AnthropicError where it is about to
    tell one. See the ledger, `rbln_backend/vllm_compat/patches.py`.
    """
    from vllm.entrypoints.anthropic import serving

    messages: Any = serving
    messages.AnthropicError = _raise_what_is_told


def _raise_what_is_told(*, message: str, **_: str) -> NoReturn:
    told = RefusedError(message, HTTPStatus.INTERNAL_SERVER_ERROR)
    raise sys.exception() or told
