"""Which form of request a body has, and what a request to a model that pools may ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from server.errors import InvalidValueError, ServerError, UnsupportedFieldError
from server.request.endpoints import request_form
from server.request.tables import prompt_fields
from server.request.values import check_values
from server.wire.endpoint import Endpoint
from tests.server.request.limits import LIMITS

MESSAGE = {"role": "user", "content": "hi"}


def endpoint_of(body: dict[str, Any]) -> Endpoint:
    """The first endpoint of models that pool whose requests have prompts under these names."""
    pooling = [endpoint for endpoint in Endpoint if endpoint.pools]
    return next((e for e in pooling if body.keys() & {*prompt_fields(e)}), Endpoint.EMBEDDINGS)


@pytest.mark.parametrize(
    ("endpoint", "body", "form"),
    [
        (Endpoint.CHAT, {"messages": [MESSAGE]}, "chat"),
        (Endpoint.TOKENIZE, {"prompt": "a"}, "tokenize"),
        (Endpoint.TOKENIZE, {"messages": [MESSAGE]}, "tokenize_chat"),
        (Endpoint.EMBEDDINGS, {}, "embeddings"),
        (Endpoint.EMBEDDINGS, {"input": "a"}, "embeddings"),
        (Endpoint.EMBEDDINGS, {"input": [[1, 2], [3]]}, "embeddings"),
        (Endpoint.EMBEDDINGS, {"input": [{"text": "a"}]}, "embeddings"),
        (Endpoint.EMBEDDINGS, {"messages": [MESSAGE]}, "embeddings_chat"),
        (Endpoint.EMBEDDINGS, {"messages": []}, "embeddings_chat"),
        (Endpoint.EMBEDDINGS, {"messages": [[MESSAGE]]}, "embeddings_chats"),
        (Endpoint.EMBEDDINGS, {"input": [MESSAGE]}, "embeddings_chat_input"),
        (Endpoint.EMBEDDINGS, {"input": [[MESSAGE], [MESSAGE]]}, "embeddings_chats_input"),
        (Endpoint.POOLING, {"input": "a"}, "pooling"),
        (Endpoint.POOLING, {"messages": [MESSAGE]}, "pooling_chat"),
        (Endpoint.CLASSIFY, {"messages": [MESSAGE]}, "classify_chat"),
        (Endpoint.SCORE, {}, "score"),
        (Endpoint.SCORE_V1, {"queries": "a", "documents": ["b"]}, "score"),
        (Endpoint.SCORE, {"queries": "a", "items": ["b"]}, "score_items"),
        (Endpoint.SCORE, {"data_1": "a"}, "score_data"),
        (Endpoint.SCORE_V1, {"text_1": "a", "text_2": "b"}, "score_text"),
        (Endpoint.RERANK_V1, {"query": "a"}, "rerank"),
        (Endpoint.RERANK_V2, {"query": "a"}, "rerank"),
    ],
)
def test_a_body_is_told_by_what_it_holds(
    endpoint: Endpoint, body: dict[str, Any], form: str
) -> None:
    assert request_form(endpoint, body) == form


@pytest.mark.parametrize(
    ("body", "error", "param", "words"),
    [
        ({"input": ""}, InvalidValueError, "input", "empty"),
        ({"input": []}, InvalidValueError, "input", "empty"),
        ({"input": ["a", ""]}, InvalidValueError, "input[1]", "empty"),
        ({"input": [[1], []]}, InvalidValueError, "input[1]", "empty"),
        ({"input": [1, 50]}, InvalidValueError, "input[1]", "0 to 49, got 50"),
        ({"input": [[1], [2, -1]]}, InvalidValueError, "input[1][1]", "got -1"),
        ({"query": ""}, InvalidValueError, "query", "empty"),
        ({"encoding_format": "bytes"}, InvalidValueError, "encoding_format", "'base64'"),
        ({"dimensions": 8}, UnsupportedFieldError, "dimensions", "is 8"),
        (
            {"query": "a", "max_tokens_per_query": -1},
            InvalidValueError,
            "max_tokens_per_query",
            "0",
        ),
        ({"query": "a", "max_tokens_per_doc": 10**6}, InvalidValueError, "max_tokens_per_doc", "0"),
    ],
)
def test_limits(body: dict[str, Any], error: type[ServerError], param: str, words: str) -> None:
    with pytest.raises(error) as caught:
        check_values(endpoint_of(body), body, LIMITS, {})
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize("field", ["dimensions", "output_dimension"])
@pytest.mark.parametrize(
    ("allowed", "value", "words"),
    [((32, 64), 33, "one of 32, 64"), (range(1, 9), 9, "1 to 8"), (range(1, 9), 0, "1 to 8")],
)
def test_dimensions_are_those_of_the_model(
    field: str, allowed: tuple[int, ...] | range, value: int, words: str
) -> None:
    limits = replace(LIMITS, dimensions=allowed)
    check_values(Endpoint.EMBEDDINGS, {field: allowed[0]}, limits, {})
    with pytest.raises(InvalidValueError, match=f"{words} for this model, got {value}") as caught:
        check_values(Endpoint.EMBEDDINGS, {field: value}, limits, {})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "body",
    [
        {"input": ["a"] * 3, "truncate_prompt_tokens": -1},
        {"input": [49] * 90, "encoding_format": "base64"},
        {"messages": [MESSAGE] * 9},
        {"input": 5, "dimensions": "many"},
    ],
)
def test_what_is_within_the_limits_passes(body: dict[str, Any]) -> None:
    check_values(Endpoint.EMBEDDINGS, body, LIMITS, {})
