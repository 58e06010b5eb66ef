"""Converts Anthropic's requests to chat requests, which vLLM serves.

The conversion validates a request a second time, so it runs where the body is parsed, not on the
event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from server.request.options import ThinkingSupport

if TYPE_CHECKING:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages


def as_chat_request(request: BaseModel, *, merge_inline_system: bool) -> BaseModel:
    """Return a request of Anthropic's API as one for a chat."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.generate.base.protocol import JsonSchemaResponseFormat, ResponseFormat

    chat = AnthropicServingMessages.to_chat_completion_request(
        request,  # type: ignore[arg-type]  # one of the two that it takes
        merge_inline_system=merge_inline_system,
    )
    config = getattr(request, "output_config", None)
    if config is not None and config.format is not None and config.format.json_schema == {}:
        # vLLM takes an empty schema for none.
        chat.response_format = ResponseFormat(
            type="json_schema", json_schema=JsonSchemaResponseFormat(name="json_schema", schema={})
        )
    if not chat.tools and chat.tool_choice is None:
        # As in a chat. Otherwise vLLM reads the answer as one that may have calls.
        chat.tool_choice = "none"
    if _is_begun(chat.messages[-1]):
        chat.add_generation_prompt, chat.continue_final_message = False, True
    return chat


def _is_begun(message: Any) -> bool:
    """Return whether a conversation ends with the beginning of its answer."""
    return (
        message["role"] == "assistant"
        and isinstance(message.get("content"), str)
        and not message.get("tool_calls")
    )


def merges_inline_system(serving: AnthropicServingMessages | None) -> bool:
    """Return how `serving` would convert system messages between others."""
    return serving is not None and serving._merge_inline_system


def thinking_support_of(serving: Any) -> ThinkingSupport:
    """Return what the served model has for thinking; `serving` is vLLM's of chats, if any."""
    if serving is None:
        return ThinkingSupport()
    parser = serving.parser_cls
    return ThinkingSupport.of(
        _template_of(serving.chat_template, serving.renderer.tokenizer),
        parses=parser is not None and parser.reasoning_parser_cls is not None,
        harmony=serving.online_renderer.use_harmony,
    )


def _template_of(given: str | None, tokenizer: object) -> str:
    """Return the chat template that a server was started with, a file or itself, or the model's."""
    from vllm.entrypoints.chat_utils import load_chat_template

    template = load_chat_template(given) or getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else ""
