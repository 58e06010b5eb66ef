"""What a prefix hit saved is told: in every API's usage, with and without a stream, and in metrics.

The server keeps blocks of 16 tokens, so of 100 shared tokens 96 lie in whole blocks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

SHARED, HIT = 100, 96
HITS = "vllm:prefix_cache_hits_total"
QUERIES = "vllm:prefix_cache_queries_total"

_seeds = itertools.count()


def new_prefix() -> list[int]:
    """Tokens that no other test of this module has sent."""
    rng = random.Random(next(_seeds))
    return [rng.randrange(10, 500) for _ in range(SHARED)]


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    with RealServer(checkpoints("llama", dtype="float32"), tmp_path_factory.mktemp("s")) as up:
        up.until_ready()
        yield up


@pytest.fixture(scope="module")
def client(server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(
    client: openai.OpenAI, prompt: list[int], *, stream: bool = False, **extra: Any
) -> int | None:
    """The cached tokens that one completion reports."""
    wish: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 2,
        "extra_body": extra,
    }
    if stream:
        options = {"include_usage": True}
        chunks = client.completions.create(**wish, stream=True, stream_options=options)
        usage = list(chunks)[-1].usage
    else:
        usage = client.completions.create(**wish).usage
    assert usage.prompt_tokens == len(prompt)
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client: openai.OpenAI, stream: bool) -> None:
    prefix = new_prefix()
    assert complete(client, [*prefix, 11, 12], stream=stream) == 0
    assert complete(client, [*prefix, 13, 14, 15], stream=stream) == HIT


def chat_usage(client: openai.OpenAI, system: str, user: str, *, stream: bool) -> Any:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    wish: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 2}
    if not stream:
        return client.chat.completions.create(**wish).usage
    options = {"include_usage": True}
    chunks = client.chat.completions.create(**wish, stream=True, stream_options=options)
    return list(chunks)[-1].usage


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client: openai.OpenAI, stream: bool) -> None:
    system = f"{stream} " + "abc " * 40
    first = chat_usage(client, system, "one", stream=stream)
    second = chat_usage(client, system, "two", stream=stream)
    # The template begins alike for everybody; what differs starts within the first blocks.
    assert first.prompt_tokens_details.cached_tokens <= 16
    saved = second.prompt_tokens_details.cached_tokens
    assert saved % 16 == 0
    assert second.prompt_tokens // 2 < saved < second.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: openai.OpenAI, stream: bool) -> None:
    def cached(tail: str) -> int:
        text = f"{stream} " + "xyz " * 40 + tail
        wish: dict[str, Any] = {"model": "tiny", "input": text, "max_output_tokens": 2}
        if stream:
            last: Any = list(client.responses.create(**wish, stream=True))[-1]
            assert last.type == "response.completed"
            return int(last.response.usage.input_tokens_details.cached_tokens)
        answer: Any = client.responses.create(**wish, store=False)
        return int(answer.usage.input_tokens_details.cached_tokens)

    assert cached("one") <= 16
    assert cached("two") > 64


def whole_input(usage: dict[str, int]) -> int:
    """All tokens of a prompt: Anthropic counts what was read from or written to a cache apart."""
    cached = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + cached


def test_messages(server: RealServer) -> None:
    def usage(user: str) -> dict[str, int]:
        messages = [{"role": "user", "content": "m " * 100 + user}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 2}
        answer = server.client.post("/v1/messages", json=body).json()
        result: dict[str, int] = answer["usage"]
        return result

    first, second = usage("one"), usage("two")
    assert second["cache_read_input_tokens"] > 64
    assert whole_input(second) == whole_input(first)


def test_a_salt_shares_with_itself_alone(client: openai.OpenAI) -> None:
    prompt = [*new_prefix(), 11]
    assert complete(client, prompt, cache_salt="tenant a") == 0
    assert complete(client, prompt, cache_salt="tenant a") == HIT
    assert complete(client, prompt, cache_salt="tenant b") == 0
    assert complete(client, prompt) == 0
    assert complete(client, prompt) == HIT


def test_metrics_count_the_same_tokens(client: openai.OpenAI, server: RealServer) -> None:
    prefix = new_prefix()
    hits, queries = server.metric(HITS), server.metric(QUERIES)
    reported = [complete(client, [*prefix, token]) for token in (11, 12, 13)]
    assert reported == [0, HIT, HIT]
    assert server.metric(HITS) - hits == 2 * HIT
    assert server.metric(QUERIES) - queries == 3 * (SHARED + 1)


@pytest.mark.parametrize(
    ("flags", "told"), [([], True), (["--no-enable-prompt-tokens-details"], False)]
)
def test_vllms_flag_can_switch_it_off(flags: list[str], told: bool) -> None:
    from server.settings import ServerSettings
    from server.vllm.flags import parse_arguments

    args = parse_arguments(["some/model", *flags], ServerSettings())
    assert args.enable_prompt_tokens_details is told
