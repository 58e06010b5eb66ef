"""Values beyond their limits: errors name the field that was sent, its value and the limit."""

import math
from dataclasses import replace
from typing import Any

import pytest

from server.errors import InvalidValueError, ServerError, UnsupportedFieldError
from server.request.endpoints import request_form
from server.request.tables import prompt_fields
from server.request.values import check_values
from server.wire import Endpoint
from tests.server.request.limits import LIMITS

RANGES = [
    *(("presence_penalty", value) for value in (-2.1, -2, 0, 2, 2.1)),
    *(("frequency_penalty", value) for value in (-3, -2.0, 2.0, 3)),
    *(("repetition_penalty", value) for value in (-1, 0, 1e-9, 1, 50, math.inf)),
    *(("min_p", value) for value in (-0.1, 0, 0.5, 1, 1.1)),
    *(("min_tokens", value) for value in (-1, 0, 5)),
    *(("top_k", value) for value in (-2, -1, 0, 1, 7)),
    *(("stream_interval", value) for value in (-1, 0, 1, 2**63 - 1)),
]


def check_range(fields: dict[str, Any]) -> None:
    check_values(Endpoint.CHAT, fields, LIMITS, {})


@pytest.mark.parametrize(("name", "value"), RANGES)
def test_the_ranges_are_vllms(name: str, value: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        SamplingParams(max_tokens=9, **{name: value})
    except VLLMValidationError:
        with pytest.raises(InvalidValueError) as caught:
            check_range({name: value})
        assert caught.value.param == name
        assert caught.value.code == "invalid_value"
        assert str(value) in caught.value.message
    else:
        check_range({name: value})


def test_a_message_has_the_range_and_other_types_pass() -> None:
    with pytest.raises(InvalidValueError, match="'min_p' must be between 0 and 1, got 2"):
        check_range({"min_p": 2})
    with pytest.raises(InvalidValueError, match="'min_tokens' must be at least 0, got -1"):
        check_range({"min_tokens": -1})
    with pytest.raises(InvalidValueError, match=f"between -1 and {2**63 - 1}, got {2**64}"):
        check_range({"top_k": 2**64})
    check_range({"min_p": None, "top_k": "many", "min_tokens": True})


@pytest.mark.parametrize("length", [1, 2**31])
def test_floats_hold_the_score_of_beams_within_the_range(length: int) -> None:
    from vllm.entrypoints.generate.beam_search.utils import get_beam_search_score

    for penalty in (-32, 32):
        check_range({"length_penalty": penalty})
        score = get_beam_search_score([5] * 4, -9.0, 2, penalty)
        assert math.isfinite(score)
        assert 0 < length**penalty < math.inf
    for penalty in (-32.1, 1000):
        with pytest.raises(InvalidValueError, match="'length_penalty' must be between -32 and 32"):
            check_range({"length_penalty": penalty})


Fields = dict[str, Any]
PATTERN = "repetition_detection"


def check_sampling(fields: Fields, *, max_logprobs: int = 20, **defaults: Any) -> None:
    limits = replace(LIMITS, max_logprobs=max_logprobs)
    check_values(Endpoint.CHAT, fields, limits, defaults)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"top_logprobs": 21}, "top_logprobs", "0 to 20 on this server (--max-logprobs), got 21"),
        ({"top_logprobs": -1}, "top_logprobs", "0 to 20 on this server (--max-logprobs), got -1"),
        ({"logprobs": 2**70}, "logprobs", f"got {2**70}"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "0 to 20"),
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_completion_tokens": -3}, "max_completion_tokens", "at least 1, got -3"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1, got 0"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "at least 0, got -1"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens", "'max_output_tokens', 2, got 3"),
        (
            {"max_tokens": 9, "max_completion_tokens": 2, "min_tokens": 3},
            "min_tokens",
            "at most 'max_completion_tokens', 2, got 3",
        ),
        ({"temperature": 0, "n": 2}, "n", "be 1 at a 'temperature' of 0, got 2"),
        ({"stop": ["a", ""]}, "stop[1]", "must not be empty"),
        ({"stop": ""}, "stop", "must not be empty"),
        ({"bad_words": [""]}, "bad_words[0]", "must not be empty"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
        ({PATTERN: {"max_pattern_size": -1}}, f"{PATTERN}.max_pattern_size", "at least 0, got -1"),
        (
            {PATTERN: {"max_pattern_size": 2, "min_pattern_size": 5}},
            f"{PATTERN}.min_pattern_size",
            "0 to 'max_pattern_size', 2, got 5",
        ),
        (
            {PATTERN: {"max_pattern_size": 2, "min_count": 1}},
            f"{PATTERN}.min_count",
            "at least 2, got 1",
        ),
    ],
)
def test_an_error_names_field_value_and_limit(fields: Fields, param: str, text: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        check_sampling(fields)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message
    assert text in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 0},
        {"max_tokens": 0, "echo": True, "min_tokens": 0},
        {"max_tokens": 3, "min_tokens": 3, "n": 2, "temperature": 0.7},
        {"n": 2, "temperature": 0, "use_beam_search": True},
        {"n": "2", "max_tokens": "5", "top_logprobs": [], "stop": 5, PATTERN: [1]},
        {PATTERN: {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}},
    ],
)
def test_other_values_pass(fields: Fields) -> None:
    check_sampling(fields)


def test_all_logprobs_where_the_server_has_no_limit() -> None:
    check_sampling({"top_logprobs": -1, "logprobs": LIMITS.vocab_size}, max_logprobs=-1)
    with pytest.raises(InvalidValueError, match="be -1 to 50 on this server"):
        check_sampling({"top_logprobs": 51}, max_logprobs=-1)


def test_the_model_s_own_temperature_counts() -> None:
    with pytest.raises(InvalidValueError, match=r"'n' must be 1 at a 'temperature' of 0\.0, got 2"):
        check_sampling({"n": 2}, temperature=0.0)
    check_sampling({"n": 2, "temperature": 1.0}, temperature=0.0)


OFFER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [[1, 2], []],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 20,
    "remote_blocks_expiry_time": None,
    "tp_size": 1,
    "pp_size": 1,
    "dcp_size": 1,
    "transfer_mode": "pull",
    "rbln_prompt_digest": "ab",
}


def check_transfer(value: Any, *, is_on: bool = True, **body: Any) -> None:
    limits = replace(LIMITS, transfers_kv=is_on)
    check_values(Endpoint.CHAT, {**body, "kv_transfer_params": value}, limits, {})


def test_an_offer_passes() -> None:
    check_transfer(OFFER)
    check_transfer({"do_remote_decode": True}, n=1)
    check_transfer({}, is_on=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": [["1"]]},
        {"remote_block_ids": [[-1]]},
        {"remote_port": 0},
        {"remote_port": True},
        {"remote_host": "a\nb"},
        {"tp_size": 0},
        {"transfer_mode": "push"},
        {"do_remote_prefill": 1},
        {"other": 1},
    ],
)
def test_what_vllms_connector_would_fail_on_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError) as error:
        check_transfer({**OFFER, **wrong})
    assert error.value.param == f"kv_transfer_params.{next(iter(wrong))}"


def test_requests_that_carry_no_offer() -> None:
    with pytest.raises(UnsupportedFieldError, match="NixlConnector"):
        check_transfer(OFFER, is_on=False)
    for body in ({"n": 2}, {"use_beam_search": True}):
        with pytest.raises(InvalidValueError, match="n=1"):
            check_transfer(OFFER, **body)
    with pytest.raises(InvalidValueError, match="an object"):
        check_transfer([OFFER])


TEXT_ONLY = replace(LIMITS, text_only=True)
TEXT = {"type": "text", "text": "a"}
URL = {"url": "http://10.0.0.1/"}
IMAGE = {"type": "image_url", "image_url": URL}


def endpoint_of(body: dict[str, Any]) -> Endpoint:
    """The first endpoint whose requests have prompts under one of these names."""
    return next(endpoint for endpoint in Endpoint if body.keys() & {*prompt_fields(endpoint)})


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [said(TEXT, IMAGE)]}, "messages[0].content[1]"),
        ({"messages": [[said(TEXT)], [said(IMAGE)]]}, "messages[1][0].content[0]"),
        ({"messages": [said({"image_url": URL})]}, "messages[0].content[0]"),
        ({"messages": [said({"type": "text", "video_url": URL})]}, "messages[0].content[0]"),
        ({"messages": [said({"type": "input_audio"})]}, "messages[0].content[0]"),
        (
            {"messages": [said({"type": "tool_result", "content": [{"type": "image"}]})]},
            "messages[0].content[0].content[0]",
        ),
        ({"input": [said({"type": "input_image"})]}, "input[0].content[0]"),
        ({"inputs": [{"content": [TEXT, IMAGE]}]}, "inputs[0].content[1]"),
        ({"images": ["data:,"]}, "images"),
        ({"query": "a", "documents": ["b", {"content": [IMAGE]}]}, "documents[1].content[0]"),
        ({"queries": {"content": [IMAGE]}, "documents": "b"}, "queries.content[0]"),
    ],
)
def test_media_are_refused_with_their_place(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        check_values(endpoint_of(body), body, TEXT_ONLY, {})
    assert caught.value.param == param
    assert "text alone" in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [said(TEXT), {"role": "user", "content": "an image_url in words"}]},
        {"messages": [said({"type": "refusal", "refusal": "no"}, 5), None, "x"]},
        {"input": "a", "images": None},
        {"messages": [said({"type": ["image"]})], "n": 1},
        {"input": [[1, 2], [3]]},
        {"documents": ["a", {"content": [TEXT]}], "tools": [{"type": "image"}]},
    ],
)
def test_text_passes(body: dict[str, Any]) -> None:
    check_values(endpoint_of(body), body, TEXT_ONLY, {})


MESSAGE = {"role": "user", "content": "hi"}


def pooling_endpoint_of(body: dict[str, Any]) -> Endpoint:
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
        check_values(pooling_endpoint_of(body), body, LIMITS, {})
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
