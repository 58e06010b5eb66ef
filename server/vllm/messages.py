"""Anthropic's requests as vLLM serves them: converted to chats, but where they are read.

To convert one validates it a second time, part by part, which must not happen on the event loop.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages


def as_chat_request(request: BaseModel, *, merge_inline_system: bool) -> BaseModel:
    """Return a request of Anthropic's API as one for a chat."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    return AnthropicServingMessages.to_chat_completion_request(
        request,  # type: ignore[arg-type]  # one of the two that it takes
        merge_inline_system=merge_inline_system,
    )


def over_chat_requests(serving: AnthropicServingMessages) -> AnthropicServingMessages:
    """Return `serving` for requests that `as_chat_request` has converted."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    class OverChatRequests(AnthropicServingMessages):
        """Takes a request as it is."""

        @classmethod
        def to_chat_completion_request(cls, anthropic_request: Any, **_: Any) -> Any:
            return anthropic_request

    made: AnthropicServingMessages = copy.copy(serving)
    made.__class__ = OverChatRequests
    return made


def merges_inline_system(serving: AnthropicServingMessages | None) -> bool:
    """Return how `serving` would convert system messages between others."""
    return serving is not None and serving._merge_inline_system
