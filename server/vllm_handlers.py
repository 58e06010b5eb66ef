"""Which of vLLM's serving classes answers which request form, and with which models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import State
from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Handler:
    """One endpoint of vLLM: its request model, what serves it, how its answers are shaped."""

    model: type[BaseModel]
    serve: Callable[[Any, Request], Awaitable[Any]] | None
    by_alias: bool = False
    exclude_none: bool = False


def generating_handlers(state: State) -> dict[str, Handler]:
    """Return what answers the forms of requests for text and for tokens."""
    from vllm.entrypoints.anthropic.protocol import (
        AnthropicCountTokensRequest,
        AnthropicMessagesRequest,
    )
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize.protocol import (
        DetokenizeRequest,
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )

    # A model that does not generate has none of these.
    chat = getattr(state, "openai_serving_chat", None)
    completion = getattr(state, "openai_serving_completion", None)
    responses = getattr(state, "openai_serving_responses", None)
    messages = getattr(state, "anthropic_serving_messages", None)
    tokens = state.serving_tokenization
    return {
        "chat": Handler(ChatCompletionRequest, chat and chat.create_chat_completion),
        "completion": Handler(CompletionRequest, completion and completion.create_completion),
        "responses": Handler(
            ResponsesRequest, responses and responses.create_responses, by_alias=True
        ),
        "messages": Handler(
            AnthropicMessagesRequest, messages and messages.create_messages, exclude_none=True
        ),
        "count_tokens": Handler(
            AnthropicCountTokensRequest, messages and messages.count_tokens, exclude_none=True
        ),
        "tokenize": Handler(TokenizeCompletionRequest, tokens.create_tokenize),
        "tokenize_chat": Handler(TokenizeChatRequest, tokens.create_tokenize),
        "detokenize": Handler(DetokenizeRequest, tokens.create_detokenize),
    }


def pooling_handlers(state: State) -> dict[str, Handler]:
    """Return what answers the forms of requests for embeddings, scores and classes."""
    from vllm.entrypoints.pooling.classify import protocol as classify
    from vllm.entrypoints.pooling.embed import protocol as embed
    from vllm.entrypoints.pooling.pooling import protocol as pooling
    from vllm.entrypoints.pooling.scoring import protocol as scoring

    # A model that generates has none of these, and one that pools has those of its task.
    forms: dict[str, dict[str, type[BaseModel]]] = {
        "serving_embedding": {
            "embeddings": embed.EmbeddingCompletionRequest,
            "embeddings_chat": embed.EmbeddingChatRequest,
            "embeddings_chats": embed.EmbeddingBatchChatRequest,
            "embeddings_chat_input": embed.EmbeddingChatInputRequest,
            "embeddings_chats_input": embed.EmbeddingBatchChatInputRequest,
            "cohere_embed": embed.CohereEmbedRequest,
        },
        "serving_pooling": {
            "pooling": pooling.PoolingCompletionRequest,
            "pooling_chat": pooling.PoolingChatRequest,
        },
        "serving_classification": {
            "classify": classify.ClassificationCompletionRequest,
            "classify_chat": classify.ClassificationChatRequest,
        },
        "serving_scores": {
            "score": scoring.ScoreQueriesDocumentsRequest,
            "score_items": scoring.ScoreQueriesItemsRequest,
            "score_data": scoring.ScoreDataRequest,
            "score_text": scoring.ScoreTextRequest,
            "rerank": scoring.RerankRequest,
        },
    }
    return {
        form: Handler(model, getattr(state, serving, None))
        for serving, models in forms.items()
        for form, model in models.items()
    }
