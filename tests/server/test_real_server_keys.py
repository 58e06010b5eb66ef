"""Limits of API keys on a real server, with the official clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

HI: list[Any] = [{"role": "user", "content": "hi"}]
LIMIT = 6000
SHOWS = ("--enable-tokenizer-info-endpoint", "--admin-key", "root")
KEYS = f"alice[tpm:{LIMIT}+rpm:600]=a,bob[tpm:200]=b"


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    checkpoint = checkpoints("llama", dtype="float32")
    with RealServer(checkpoint, tmp_path_factory.mktemp("k"), "--api-key", KEYS, *SHOWS) as up:
        up.until_ready()
        yield up


def _client(server: RealServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def _remaining(answer: Any) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_prompt_and_longest_answer_are_reserved_and_corrected(server: RealServer) -> None:
    chat = _client(server, "a").chat.completions.with_raw_response
    answer = chat.create(
        model="tiny", messages=HI, max_tokens=100, n=2, stop=["e", "a", " "], seed=1
    )
    usage = answer.parse().usage
    assert usage is not None
    reserved = usage.prompt_tokens + 200
    # 100 come back in a second.
    assert LIMIT - reserved <= _remaining(answer) < LIMIT - reserved + 100
    assert answer.headers["x-ratelimit-limit-requests"] == "600"
    # By now the reservation is what was used; an answer without a bound reserves its prompt alone.
    stream = chat.create(model="tiny", messages=HI, stream=True)
    least = LIMIT - usage.total_tokens - usage.prompt_tokens
    assert least <= _remaining(stream) <= LIMIT - usage.prompt_tokens
    assert list(stream.parse())


def test_a_refused_client_is_served_after_the_time_it_was_given(server: RealServer) -> None:
    chat = _client(server, "b").chat.completions
    first = chat.create(model="tiny", messages=HI, max_tokens=40, extra_body={"min_tokens": 40})
    assert first.usage is not None
    left = 200 - first.usage.total_tokens
    bound = left - first.usage.prompt_tokens + 20
    with pytest.raises(openai.RateLimitError) as caught:
        chat.create(model="tiny", messages=HI, max_tokens=bound)
    error = caught.value
    assert (error.code, error.type) == ("rate_limit_exceeded", "rate_limit_error")
    wait_s = int(error.response.headers["retry-after-ms"]) / 1000
    # 20 tokens are missing, at 200 a minute.
    assert 0 < wait_s <= 6
    time.sleep(wait_s)
    chat.create(model="tiny", messages=HI, max_tokens=bound, stop=["e", "a", " "])


def test_anthropics_client_gets_its_headers(server: RealServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="a", max_retries=0)
    answer = client.messages.with_raw_response.create(model="tiny", messages=HI, max_tokens=5)
    assert answer.headers["anthropic-ratelimit-tokens-limit"] == str(LIMIT)
    assert int(answer.headers["anthropic-ratelimit-tokens-remaining"]) < LIMIT
    limited = anthropic.Anthropic(base_url=server.url, api_key="b", max_retries=0)
    with pytest.raises(anthropic.RateLimitError) as caught:
        for _ in range(3):
            limited.messages.create(model="tiny", messages=HI, max_tokens=60)
    assert caught.value.body["error"]["code"] == "rate_limit_exceeded"  # type: ignore[index]
    assert "retry-after" in caught.value.response.headers


def test_the_tokenizer_is_shown_without_paths(server: RealServer) -> None:
    assert server.client.get("/tokenizer_info").status_code == 401
    info = server.client.get("/tokenizer_info", headers={"x-api-key": "a"}).json()
    assert info["tokenizer_class"]
    assert "chat_template" in info
    shown = [value for value in info.values() if isinstance(value, str)]
    assert not any(value.startswith("/") for value in shown)
