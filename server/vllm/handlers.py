"""vLLM's request models and serving methods, by form of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import State
from starlette.requests import Request

from server.request.record import RequestRecord
from server.vllm.responses.answer import compacted_json, response_json
from server.vllm.serving import adapted
from server.vllm.streams.custom_calls import with_custom_calls
from server.vllm.streams.stamps import add_prediction_counts, put_on
from server.wire.endpoint import JsonObject

ToBody = Callable[[Any, JsonObject, RequestRecord], bytes]
"""Returns the JSON body of vLLM's answer, with additional fields."""


def _body(answer: BaseModel, stamp: JsonObject, _: RequestRecord) -> bytes:
    put_on(answer, stamp)
    add_prediction_counts(getattr(answer, "usage", None))
    return answer.model_dump_json().encode()


def _chat_body(answer: BaseModel, stamp: JsonObject, record: RequestRecord) -> bytes:
    whole = _body(answer, stamp, record)
    return with_custom_calls(whole, record.custom_tools) if record.custom_tools else whole


def _plain_body(answer: BaseModel, _stamp: JsonObject, _: RequestRecord) -> bytes:
    return answer.model_dump_json().encode()


def _body_without_nulls(answer: BaseModel, _stamp: JsonObject, _: RequestRecord) -> bytes:
    return answer.model_dump_json(exclude_none=True).encode()


@dataclass(frozen=True, slots=True)
class Handler:
    """Request model, serving method (if offered) and answer serializer of one form."""

    model: type[BaseModel]
    serve: Callable[[Any, Request], Awaitable[Any]] | None
    to_body: ToBody = _body


def request_models() -> dict[str, type[BaseModel]]:
    """Return vLLM's request models by the form (`server.request.endpoints`) of a request."""
    from vllm.entrypoints.anthropic import protocol as anthropic
    from vllm.entrypoints.pooling.classify import protocol as classify
    from vllm.entrypoints.pooling.embed import protocol as embed
    from vllm.entrypoints.pooling.pooling import protocol as pooling
    from vllm.entrypoints.pooling.scoring import protocol as scoring
    from vllm.entrypoints.serve.tokenize import protocol as tokenize

    from server.vllm.rendering import requests as rendering
    from server.vllm.responses import requests as responses

    return {
        "chat": rendering.ChatCompletionRequest,
        "completion": rendering.CompletionRequest,
        "responses": responses.ResponseRequest,
        "input_tokens": responses.InputTokensRequest,
        "compact": responses.CompactRequest,
        "messages": anthropic.AnthropicMessagesRequest,
        "count_tokens": anthropic.AnthropicCountTokensRequest,
        "render_chat": rendering.RenderChatRequest,
        "render_completion": rendering.RenderCompletionRequest,
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


_ANTHROPIC = "anthropic_serving_messages"
_RESPONSES = "openai_serving_responses"
_SERVED_BY = {
    "chat": ("openai_serving_chat", "create_chat_completion"),
    "completion": ("openai_serving_completion", "create_completion"),
    "responses": (_RESPONSES, "create_responses"),
    "input_tokens": (_RESPONSES, "count_input_tokens"),
    "compact": (_RESPONSES, "create_responses"),
    "messages": (_ANTHROPIC, "create_messages"),
    "count_tokens": (_ANTHROPIC, "count_tokens"),
    "render_chat": ("serving_render", "answer_chat"),
    "render_completion": ("serving_render", "answer_completion"),
    **dict.fromkeys(("tokenize", "tokenize_chat"), ("serving_tokenization", "create_tokenize")),
    "detokenize": ("serving_tokenization", "create_detokenize"),
    **dict.fromkeys(
        (
            *("embeddings", "embeddings_chat", "embeddings_chats", "embeddings_chat_input"),
            *("embeddings_chats_input", "cohere_embed"),
        ),
        ("serving_embedding", "__call__"),
    ),
    **dict.fromkeys(("pooling", "pooling_chat"), ("serving_pooling", "__call__")),
    **dict.fromkeys(("classify", "classify_chat"), ("serving_classification", "__call__")),
    **dict.fromkeys(
        ("score", "score_items", "score_data", "score_text", "rerank"),
        ("serving_scores", "__call__"),
    ),
}
"""Attribute of vLLM's application state and method that serve a form."""

_BODIES: Mapping[str, ToBody] = {
    "chat": _chat_body,
    "responses": response_json,
    "compact": compacted_json,
    "count_tokens": _body_without_nulls,
    **dict.fromkeys(("render_chat", "render_completion"), _plain_body),
}


def handlers(state: State) -> dict[str, Handler]:
    """Return the handler of each form; a model offers the forms of its tasks only."""
    return {
        form: Handler(model, _serving(state, form), _BODIES.get(form, _body))
        for form, model in request_models().items()
    }


def _serving(state: State, form: str) -> Callable[[Any, Request], Awaitable[Any]] | None:
    name, method = _SERVED_BY[form]
    # A model has the serving classes of its tasks only.
    serving = getattr(state, name, None)
    if serving is None:
        return None
    return getattr(adapted(serving), method)  # type: ignore[no-any-return]
