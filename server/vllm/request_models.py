"""vLLM's request models by form; prompts that are cut leave room for an answer.

Requests that are rendered and not run have classes of their own: the schemas of their fields
differ. Import this after `allow_stop_strings`: vLLM's models take the limit as they are made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel, PrivateAttr, model_validator
from vllm.config import ModelConfig
from vllm.entrypoints.anthropic import protocol as anthropic
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.entrypoints.openai.responses import protocol as responses
from vllm.entrypoints.pooling.classify import protocol as classify
from vllm.entrypoints.pooling.embed import protocol as embed
from vllm.entrypoints.pooling.pooling import protocol as pooling
from vllm.entrypoints.pooling.scoring import protocol as scoring
from vllm.entrypoints.serve.tokenize import protocol as tokenize
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


class ChatCompletionRequest(chat.ChatCompletionRequest):
    """A request for a chat."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        return leaving_room(super().build_tok_params(model_config))


class RenderCompletionRequest(completion.CompletionRequest):
    """A request for the prompts and the sampling parameters of a completion."""

    @model_validator(mode="before")
    @classmethod
    def normalize_null_max_tokens(cls, data: Any) -> Any:
        """Take null as absent; vLLM's method sets its default, as if it had been sent."""
        if isinstance(data, dict) and data.get("max_tokens") is None:
            return {name: value for name, value in data.items() if name != "max_tokens"}
        return data

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        most = model_config.max_model_len - (self.max_tokens or 0)
        is_default = "max_tokens" not in self.model_fields_set
        # What a client has not limited takes the room that is left.
        free = is_default and (self.truncate_prompt_tokens or 0) > most
        request = self.model_copy(update={"max_tokens": 0}) if free else self
        return leaving_room(completion.CompletionRequest.build_tok_params(request, model_config))


class CompletionRequest(RenderCompletionRequest):
    """A request for completions."""

    _echoed: Any = PrivateAttr(None)

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the prompts, for echoes with the tokens' places."""
        params = super().build_tok_params(model_config)
        return replace(params, return_token_offsets=bool(self.echo))


class RenderChatRequest(ChatCompletionRequest):
    """A request for the prompt and the sampling parameters of a chat."""


class ResponseRequest(responses.ResponsesRequest):
    """A request for a response."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the rendered prompt.

        The chat template has written the special tokens, as in chats; vLLM adds them again.
        """
        params = leaving_room(super().build_tok_params(model_config))
        return replace(params, add_special_tokens=False)


class InputTokensRequest(ResponseRequest):
    """A request for the number of tokens that a response's prompt would have."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the rendered prompt, unlimited unless truncated."""
        params = super().build_tok_params(model_config)
        is_cut = params.truncate_prompt_tokens is not None
        return params if is_cut else replace(params, max_total_tokens=None)


class CompactRequest(ResponseRequest):
    """A request for a compacted conversation."""


def request_models() -> dict[str, type[BaseModel]]:
    """Return vLLM's request models by the form (`server.request.endpoints`) of a request."""
    return {
        "chat": ChatCompletionRequest,
        "completion": CompletionRequest,
        "responses": ResponseRequest,
        "input_tokens": InputTokensRequest,
        "compact": CompactRequest,
        "messages": anthropic.AnthropicMessagesRequest,
        "count_tokens": anthropic.AnthropicCountTokensRequest,
        "render_chat": RenderChatRequest,
        "render_completion": RenderCompletionRequest,
        "tokenize": tokenize.TokenizeCompletionRequest,
        "tokenize_chat": tokenize.TokenizeChatRequest,
        "detokenize": tokenize.DetokenizeRequest,
        "embeddings": embed.EmbeddingCompletionRequest,
        "embeddings_chat": embed.EmbeddingChatRequest,
        "embeddings_chats": embed.EmbeddingBatchChatRequest,
        "embeddings_chat_input": embed.EmbeddingChatInputRequest,
        "embeddings_chats_input": embed.EmbeddingBatchChatInputRequest,
        "cohere_embed": embed.CohereEmbedRequest,
        "pooling": pooling.PoolingCompletionRequest,
        "pooling_chat": pooling.PoolingChatRequest,
        "classify": classify.ClassificationCompletionRequest,
        "classify_chat": classify.ClassificationChatRequest,
        "score": scoring.ScoreQueriesDocumentsRequest,
        "score_items": scoring.ScoreQueriesItemsRequest,
        "score_data": scoring.ScoreDataRequest,
        "score_text": scoring.ScoreTextRequest,
        "rerank": scoring.RerankRequest,
    }
