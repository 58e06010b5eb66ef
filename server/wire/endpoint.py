"""Endpoints that the engine serves, and the type of JSON objects."""

from __future__ import annotations

import enum
from typing import Any

JsonObject = dict[str, Any]


class Endpoint(enum.Enum):
    """The endpoints that need the engine; the value is the path, the method is POST."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSES = "/v1/responses"
    INPUT_TOKENS = "/v1/responses/input_tokens"
    COMPACT = "/v1/responses/compact"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    RENDER_CHAT = "/v1/chat/completions/render"
    RENDER_COMPLETION = "/v1/completions/render"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    EMBEDDINGS = "/v1/embeddings"
    COHERE_EMBED = "/v2/embed"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    SCORE = "/score"
    SCORE_V1 = "/v1/score"
    RERANK = "/rerank"
    RERANK_V1 = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"

    @property
    def anthropic(self) -> bool:
        """True where errors and events have the form of Anthropic's API."""
        return self in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS)

    @property
    def chats(self) -> bool:
        """True where the body is that of a chat completion."""
        return self in (Endpoint.CHAT, Endpoint.RENDER_CHAT)

    @property
    def renders(self) -> bool:
        """True where the answer has the token ids and the sampling parameters of a request."""
        return self in (Endpoint.RENDER_CHAT, Endpoint.RENDER_COMPLETION)

    @property
    def takes_items(self) -> bool:
        """True where the input is a list of items of the Responses API."""
        return self in (Endpoint.RESPONSES, Endpoint.INPUT_TOKENS, Endpoint.COMPACT)

    @property
    def pools(self) -> bool:
        """True for embeddings, scores and classes, which pooling models serve."""
        return self in _POOLING_ENDPOINTS

    @property
    def scores(self) -> bool:
        """True where each answer is about a query and a document."""
        return self in _SCORING_ENDPOINTS

    @property
    def named_events(self) -> bool:
        """True where each SSE frame has an `event:` line and no stream ends with [DONE]."""
        return self in (Endpoint.MESSAGES, Endpoint.RESPONSES)


_SCORING_ENDPOINTS = frozenset(
    (
        Endpoint.SCORE,
        Endpoint.SCORE_V1,
        Endpoint.RERANK,
        Endpoint.RERANK_V1,
        Endpoint.RERANK_V2,
    )
)
_POOLING_ENDPOINTS = _SCORING_ENDPOINTS | {
    Endpoint.EMBEDDINGS,
    Endpoint.COHERE_EMBED,
    Endpoint.POOLING,
    Endpoint.CLASSIFY,
}
