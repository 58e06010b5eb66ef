"""vLLM's serving class of Anthropic's API: it takes chats, and answers with messages of our own."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from vllm.exceptions import VLLMValidationError

from server.errors import ContextLengthError
from server.request.options import Tier
from server.request.record import record_of
from server.vllm.errors import TOO_LONG_PARAMETERS
from server.vllm.messages.answers import message_of
from server.vllm.messages.events import message_events


@cache
def over_chat_requests() -> type:
    """Return the class, which cannot be made before vLLM's serving modules are imported."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    class OverChatRequests(AnthropicServingMessages):
        """Takes requests of Anthropic's API that `server.vllm.messages.requests` made chats of."""

        @classmethod
        def to_chat_completion_request(cls, anthropic_request: Any, **_: Any) -> Any:
            """Return a request as it is."""
            return anthropic_request

        async def create_messages(self, request: Any, raw_request: Any = None) -> Any:
            """Return a message, the frames of its events, or vLLM's error."""
            wanted, record = request.max_tokens, record_of(raw_request.scope)
            tier = (record.tier or Tier.DEFAULT).anthropic
            answer: Any = await self.create_chat_completion(request, raw_request)
            if isinstance(answer, ErrorResponse):
                return answer
            if isinstance(answer, ChatCompletionResponse):
                return Response(to_json(message_of(answer, wanted, tier)))
            return message_events(answer, wanted, record.tokens.of_prefix, tier)

        async def render_chat_request(self, request: Any) -> Any:
            """Render a chat; `max_tokens` is a bound, and need not fit behind the prompt."""
            wanted = request.max_tokens, request.max_completion_tokens
            most = self.model_config.max_model_len - 1
            request.max_tokens = request.max_completion_tokens = None
            try:
                rendered = await super().render_chat_request(request)
            except VLLMValidationError as error:
                if error.parameter not in TOO_LONG_PARAMETERS:
                    raise
                raise _too_long(_length(error, self.renderer), most) from error
            finally:
                request.max_tokens, request.max_completion_tokens = wanted
            if not isinstance(rendered, ErrorResponse):
                _check_room(rendered[1], most)
            return rendered

    return OverChatRequests


def _length(error: VLLMValidationError, renderer: Any) -> str:
    """Return the number of tokens of a prompt, or the least number that its characters make."""
    size = int(str(error.value))
    if error.parameter == "input_tokens":
        return str(size)
    return f"at least {math.ceil(size / renderer.get_tokenizer().max_chars_per_token)}"


def _check_room(prompts: list[Any], most: int) -> None:
    for prompt in prompts:
        length = len(prompt.get("prompt_token_ids") or ())
        if length > most:
            raise _too_long(str(length), most)


def _too_long(length: str, most: int) -> ContextLengthError:
    # Clients of this API know the error by its first words, and then shorten the conversation.
    return ContextLengthError(
        f"prompt is too long: {length} tokens > {most} maximum, which leaves one for the answer.",
        param="messages",
    )
