"""200 random requests up to every limit, some aborted: nothing leaks, nothing compiles."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_REQUESTS = 200
CONCURRENCY = 24
MAX_MODEL_LEN = 256
OUTCOMES = "rbln_http_requests_total{"


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    model = checkpoints("llama", dtype="float32")
    with RealServer(model, tmp_path_factory.mktemp("s"), "--max-in-flight", "200") as up:
        up.until_ready()
        yield up


def random_body(rng: random.Random) -> dict[str, Any]:
    length = rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 128, 200, MAX_MODEL_LEN - 1])
    room = MAX_MODEL_LEN - length
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [rng.randrange(10, 500) for _ in range(length)],
        "max_tokens": rng.choice([1, min(8, room), min(40, room), room]),
        "temperature": rng.choice([0, 0.5, 1, 2]),
        "stream": rng.random() < 0.6,
    }
    extras: list[dict[str, Any]] = [
        {},
        {"n": 4, "temperature": 1},
        {"top_p": 0.3, "top_k": 3},
        {"min_p": 0.2, "seed": 7},
        {"presence_penalty": 2, "frequency_penalty": -2},
        {"repetition_penalty": 1.3, "logit_bias": {"20": 5}},
        {"logprobs": 5},
        {"stop": ["a", "the"]},
        {"ignore_eos": True},
        {"min_tokens": 1, "bad_words": ["the"]},
        {"allowed_token_ids": [30, 31, 32, 33]},
        {"prompt_logprobs": 1, "stream": False},
        {"response_format": {"type": "json_object"}},
    ]
    return body | rng.choice(extras)


async def one_request(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int) -> str:
    """``leave_after``: frames of a stream after which the client goes away; 0 stays."""
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert all(c["finish_reason"] in ("stop", "length") for c in answer.json()["choices"])
        return "ok"
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        frames = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return "ok"
            if line.startswith("data: "):
                assert '"error"' not in line[:20], line
                frames += 1
            if leave_after and frames >= leave_after:
                return "left"
    raise AssertionError("the stream ended without [DONE]")


async def load(url: str, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def bounded(body: dict[str, Any], leave_after: int) -> str:
            async with gate:
                return await one_request(client, body, leave_after)

        tasks = [bounded(random_body(rng), rng.choice([0, 0, 1, 5])) for _ in range(NUM_REQUESTS)]
        return Counter(await asyncio.gather(*tasks))


def test_every_request_has_one_outcome_and_nothing_is_left_behind(server: RealServer) -> None:
    before = outcomes(server)
    found = asyncio.run(load(server.url, seed=1))
    assert found["ok"] + found["left"] == NUM_REQUESTS
    assert found["left"] > 10
    until(lambda: server.metric("rbln_serve_in_flight_requests") == 0)
    # vLLM publishes its gauges with the next step.
    answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:num_requests_waiting{") == 0
    assert server.metric("rbln_recompiles_after_warmup_total") == 0
    counted = outcomes(server)
    counted.subtract(before)
    assert counted.total() == NUM_REQUESTS + 1
    assert set(+counted) <= {"ok", "aborted"}, counted
    # A client may leave when everything was sent already.
    assert 0 < counted["aborted"] <= found["left"]


def outcomes(server: RealServer) -> Counter[str]:
    """Completions counted so far, by outcome."""
    counted: Counter[str] = Counter()
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith(OUTCOMES) and 'route="/v1/completions"' in line:
            outcome = line.split('outcome="')[1].split('"')[0]
            counted[outcome] += int(float(line.split()[-1]))
    return counted


def until(condition: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the server did not come to rest"
        time.sleep(0.02)
