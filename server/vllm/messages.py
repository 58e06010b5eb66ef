"""Anthropic's requests as vLLM serves them: converted to chats, but where they are read.

To convert one validates it a second time, part by part, which must not happen on the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def merges_inline_system(serving: AnthropicServingMessages | None) -> bool:
    """Return how `serving` would convert system messages between others."""
    return serving is not None and serving._merge_inline_system
