"""vLLM's requests of chats and completions, whose cut prompts leave room for an answer.

Those that are rendered and not run are classes of their own: the schemas of their fields differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import PrivateAttr, model_validator
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion import protocol as chats
from vllm.entrypoints.openai.completion import protocol as completions
from vllm.renderers import TokenizeParams


def leaving_room(params: TokenizeParams) -> TokenizeParams:
    """Return the parameters of a prompt; where it is cut, its answer may have at least one token.

    vLLM cuts a prompt whose answer has no limit to the whole context.
    """
    kept, total = params.truncate_prompt_tokens, params.max_total_tokens
    if kept is None or total is None or params.max_output_tokens:
        return params
    most = total - 1
    return replace(params, truncate_prompt_tokens=most if kept < 0 else min(kept, most))


class ChatCompletionRequest(chats.ChatCompletionRequest):
    """A request for a chat."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the rendered prompt."""
        return leaving_room(super().build_tok_params(model_config))


class RenderCompletionRequest(completions.CompletionRequest):
    """A request for the prompts and the sampling parameters of a completion."""

    @model_validator(mode="before")
    @classmethod
    def normalize_null_max_tokens(cls, data: Any) -> Any:
        """Take null as absent; vLLM's method sets its default, as if it had been sent."""
        if isinstance(data, dict) and data.get("max_tokens") is None:
            return {name: value for name, value in data.items() if name != "max_tokens"}
        return data

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the prompts."""
        most = model_config.max_model_len - (self.max_tokens or 0)
        is_default = "max_tokens" not in self.model_fields_set
        # What a client has not limited takes the room that is left.
        free = is_default and (self.truncate_prompt_tokens or 0) > most
        request = self.model_copy(update={"max_tokens": 0}) if free else self
        return leaving_room(completions.CompletionRequest.build_tok_params(request, model_config))


class CompletionRequest(RenderCompletionRequest):
    """A request for completions."""

    _echoed: Any = PrivateAttr(None)

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the prompts, for echoes with the tokens' places."""
        params = super().build_tok_params(model_config)
        return replace(params, return_token_offsets=bool(self.echo))


class RenderChatRequest(ChatCompletionRequest):
    """A request for the prompt and the sampling parameters of a chat."""
