"""vLLM's requests of chats and completions that are rendered and not run.

Classes of their own, because the schemas of their fields differ from those of a generation.
"""

from __future__ import annotations

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest


class RenderChatRequest(ChatCompletionRequest):
    """A request for the prompt and the sampling parameters of a chat."""


class RenderCompletionRequest(CompletionRequest):
    """A request for the prompts and the sampling parameters of a completion."""
