"""Refusals: the status, the SDK's exception, the envelope with a code of text and the field."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.target import Target, error_of

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]


def body(served: str, **more: Any) -> dict[str, Any]:
    wish = {"model": served, "messages": HI, "max_tokens": 4, **more}
    return {name: value for name, value in wish.items() if value is not ...}


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=HI)
    assert caught.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_has_openais_code(client: openai.OpenAI, model: str) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 300_000}]
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=model, messages=long, max_tokens=4)
    if caught.value.status_code == 413:
        return
    assert caught.value.status_code == 400
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 2),
        ("n", 0),
        ("max_tokens", -5),
        ("presence_penalty", 100),
        ("top_logprobs", 5),
        ("stop", 7),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "unknown", "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("logit_bias", {"40": 1000}),
        ("stream_options", {"include_usage": True}),
    ],
    ids=lambda part: part if isinstance(part, str) else json.dumps(part),
)
def test_a_value_that_is_wrong_is_a_400(
    http: httpx.Client, model: str, field: str, value: object
) -> None:
    answer = http.post(CHAT, json=body(model, **{field: value}))
    assert answer.status_code == 400, answer.text
    error_of(answer)


@pytest.mark.parametrize(
    "wish",
    [{"temperature": -1}, {"n": 0}, {"model": "no-such-model"}],
    ids=["temperature", "n", "model"],
)
def test_the_code_is_a_text(http: httpx.Client, model: str, wish: dict[str, Any]) -> None:
    error = error_of(http.post(CHAT, json=body(model, **wish)))
    assert isinstance(error["code"], str), f"code is {error['code']!r}, which is no text"


def test_the_field_is_named(http: httpx.Client, model: str) -> None:
    error = error_of(http.post(CHAT, json=body(model, temperature=-1)))
    assert error["param"] == "temperature"
    answer = http.post(CHAT, json=body(model, messages=...))
    assert answer.status_code == 400
    assert "messages" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"null", b"", b'{"a": NaN}', b"\xff", b'{"a":' * 5000 + b"1" + b"}" * 5000],
    ids=lambda body: repr(body)[1:20],
)
def test_a_body_that_is_no_object_is_a_400(http: httpx.Client, content: bytes) -> None:
    answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error_of(answer)


def test_a_body_of_another_type_is_refused(http: httpx.Client) -> None:
    answer = http.post(CHAT, content=b"a=1", headers={"content-type": "text/plain"})
    assert answer.status_code in (400, 415)
    error_of(answer)


@pytest.mark.parametrize("field", ["guided_json", "no_such_field"])
def test_an_unknown_field_is_refused(http: httpx.Client, model: str, field: str) -> None:
    answer = http.post(CHAT, json=body(model, **{field: {"type": "object"}}))
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field


def test_a_picture_for_a_model_of_text_is_refused(http: httpx.Client, model: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    turns = [{"role": "user", "content": [part]}]
    answer = http.post(CHAT, json=body(model, messages=turns))
    assert 400 <= answer.status_code < 500
    error_of(answer)


def test_a_wrong_key_is_an_authentication_error(target: Target) -> None:
    if target.api_key is None:
        pytest.skip("run with --api-key to test keys")
    with target.sdk(api_key="wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "path", ["/tokenize", "/metrics", "/version", "/v1/models", "/openapi.json"]
)
def test_no_route_is_open_without_the_key(target: Target, path: str) -> None:
    if target.api_key is None:
        pytest.skip("run with --api-key to test keys")
    answer = httpx.request("POST" if path == "/tokenize" else "GET", target.base_url + path)
    assert answer.status_code in (401, 404)


def test_excess_requests_get_a_retry_after(target: Target, model: str) -> None:
    def one(_: int) -> httpx.Response:
        with target.http() as http:
            return http.post(CHAT, json=body(model, max_tokens=16))

    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(one, range(48)))
    statuses = {answer.status_code for answer in answers}
    assert statuses <= {200, 429, 503}, statuses
    assert 200 in statuses
    for answer in answers:
        if answer.status_code != 200:
            assert float(answer.headers["retry-after"]) >= 0
            error_of(answer)


def test_the_sdk_retries_and_gets_its_answer(target: Target, model: str) -> None:
    def one(_: int) -> str:
        with target.sdk(max_retries=12) as client:
            answer = client.chat.completions.create(model=model, messages=HI, max_tokens=16)
            return answer.id

    with ThreadPoolExecutor(24) as pool:
        assert len(set(pool.map(one, range(24)))) == 24
