"""Random requests up to every limit, some aborted: nothing leaks, nothing compiles."""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer
from tests.server.test_real_server_end import gone, in_flight

pytestmark = pytest.mark.engine

NUM_REQUESTS = 120
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


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------ queue timeout
HI = [{"role": "user", "content": "hi"}]
FLAGS = (
    *"--max-model-len 1024 --max-queue-s 0.2 --max-queued-tokens 600".split(),
    "--scheduling-policy",
    "priority",
)


@pytest.fixture(scope="module")
def short_wait(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    model = checkpoints("llama", dtype="float32")
    with RealServer(model, tmp_path_factory.mktemp("s"), *FLAGS) as up:
        up.until_ready()
        yield up


def while_stopped(
    server: RealServer, requests: list[tuple[str, dict[str, Any]]], in_flight: int
) -> list[httpx.Response]:
    """Send requests to an engine that stands still until `in_flight` answers have waited for long.

    It reads them when it goes on; their queue time counts from their arrival.
    """
    with ThreadPoolExecutor(len(requests)) as pool:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        try:
            tasks = [pool.submit(server.client.post, path, json=body) for path, body in requests]
            until(lambda: server.metric("rbln_admission_in_flight") == in_flight, timeout_s=20)
            time.sleep(1)
        finally:
            os.kill(server.engine_pid(), signal.SIGCONT)
        return [task.result() for task in tasks]


WAITING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/chat/completions", {"messages": HI, "n": 3}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"model": "tiny", "messages": HI, "max_tokens": 5}),
]


SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}


def test_every_endpoint_reports_a_queue_timeout(short_wait: RealServer) -> None:
    requests = [(path, {**body, "stream": s}) for path, body in WAITING for s in (False, True)]
    for path, body in requests:
        # What vLLM makes at its first use must not hold them up below.
        assert short_wait.client.post(path, json={**body, **SHORT.get(path, {})}).status_code == 200
    answers = while_stopped(short_wait, requests, in_flight=2 * (1 + 3 + 2 + 1 + 1))
    for (path, body), answer in zip(requests, answers, strict=True):
        assert answer.status_code == 503, (path, body, answer.text)
        error = answer.json()["error"]
        assert error["code"] == "queue_timeout"
        assert "0.2 s" in error["message"]
        assert "--max-queue-s" in error["message"]
        assert int(answer.headers["retry-after"]) >= 1
    rejected = 'rbln_admission_rejections_total{reason="queue_timeout"}'
    assert short_wait.metric(rejected) == len(requests)
    # Nothing of them is left in the engine, and none of them counts as served.
    once = short_wait.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert once.status_code == 200
    assert short_wait.metric("vllm:num_requests_waiting{") == 0
    assert short_wait.metric("rbln_kv_blocks_used") == 0
    log = short_wait.log.read_text()
    assert "Traceback" not in log, log


def test_prompts_beyond_the_backlog_are_refused(short_wait: RealServer) -> None:
    requests = [("/v1/completions", {"prompt": [7] * 400, "max_tokens": 1})] * 8
    answers = while_stopped(short_wait, requests, in_flight=2)
    full = [answer for answer in answers if answer.status_code == 429]
    assert len(full) == 6
    assert full[0].json()["error"]["code"] == "overloaded"
    said = re.fullmatch(
        r"800 prompt tokens wait for their prefill, and at most 600 may \(--max-queued-tokens\)\. "
        r"Retry after (\d+) s\.",
        full[0].json()["error"]["message"],
    )
    assert said and said[1] == full[0].headers["retry-after"]
    rejected = 'rbln_admission_rejections_total{reason="queued_tokens"}'
    assert short_wait.metric(rejected) == len(full)
    assert short_wait.metric("rbln_admission_max_queued_tokens") == 600


def send(server: RealServer, **headers: str) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 1}
    return server.client.post("/v1/completions", json=body, headers=headers)


def test_a_priority_may_come_in_a_header(short_wait: RealServer) -> None:
    assert send(short_wait, **{"X-Vllm-Priority": "-3"}).status_code == 200
    for value in ("high", "1.5", "9" * 30):
        refused = send(short_wait, **{"X-Vllm-Priority": value})
        assert refused.status_code == 400, value
        assert refused.json()["error"]["param"] == "X-Vllm-Priority"
    body = {"prompt": "a", "priority": 10**30}
    assert (
        short_wait.client.post("/v1/completions", json=body).json()["error"]["param"] == "priority"
    )


# -------------------------------------------------------------------------------------------- chaos
MAX_NUM_SEQS = 4
NUM_STREAMS = 200
STEP_TIMEOUT_S = 4
STREAM = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
SHORT_TIMES = {**STREAM, "n": 4, "max_tokens": 20, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def failing(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    model = checkpoints("llama", dtype="float32")
    flags = ("--max-model-len", "1024", "--step-timeout-s", str(STEP_TIMEOUT_S))
    limits = ("--max-in-flight", str(NUM_STREAMS), "--max-num-queued-tokens", "100000")
    with RealServer(model, tmp_path_factory.mktemp("s"), *flags, *limits) as up:
        up.until_ready()
        yield up


def at_rest(server: RealServer) -> bool:
    return not any(
        server.metric(name)
        for name in (
            "rbln_serve_in_flight_requests",
            "rbln_admission_in_flight",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting{",
            "vllm:kv_cache_usage_perc",
            "rbln_kv_blocks_used",
        )
    )


@pytest.mark.slow
def test_two_hundred_streams_that_are_cut_leave_nothing(failing: RealServer) -> None:
    async def open_and_cut() -> None:
        host, port = failing.url.removeprefix("http://").split(":")
        content = json.dumps(STREAM).encode()
        request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(content), content)
        )
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(NUM_STREAMS)]
        for _, writer in streams:
            writer.write(request)
        await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in streams[:2]))
        while failing.metric("rbln_admission_in_flight") < NUM_STREAMS:
            await asyncio.sleep(0.02)
        for _, writer in streams:
            writer.transport.abort()

    asyncio.run(open_and_cut())
    until(lambda: at_rest(failing), timeout_s=20)
    answer = failing.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200


async def one_answer(client: httpx.AsyncClient, counts: Counter[str]) -> None:
    """Send one stream and check that what comes is whole, or a refusal that says when."""
    async with client.stream("POST", "/v1/completions", json=SHORT_TIMES) as answer:
        text = (await answer.aread()).decode()
    counts[str(answer.status_code)] += 1
    if answer.status_code == 200:
        assert text.endswith("data: [DONE]\n\n")
        assert '"completion_tokens":80' in text
        assert '"error"' not in text
    else:
        assert answer.status_code == 429, text
        assert json.loads(text)["error"]["code"] == "overloaded"
        assert 1 <= int(answer.headers["retry-after"]) <= 60


@pytest.mark.slow
def test_fifty_times_the_capacity_gets_an_answer_each(failing: RealServer) -> None:
    number = 50 * MAX_NUM_SEQS
    counts: Counter[str] = Counter()

    async def storm() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=failing.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one_answer(client, counts) for _ in range(number)))

    asyncio.run(storm())
    assert counts.total() == number
    # Each asks for four answers, and so many may be in flight.
    assert counts["200"] >= NUM_STREAMS / 4
    assert counts["429"] > counts["200"]
    rejected = 'rbln_admission_rejections_total{reason="in_flight"}'
    assert failing.metric(rejected) == counts["429"]
    until(lambda: at_rest(failing), timeout_s=20)


@pytest.mark.slow
def test_a_hung_engine_is_killed_and_reported(failing: RealServer) -> None:
    """The last test of this module: its server ends."""
    out: list[str] = []
    engine = failing.engine_pid()
    stream = in_flight(failing, out)
    stopped = time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    while failing.client.get("/readyz").status_code == 200:
        time.sleep(0.05)
    waited = time.monotonic() - stopped
    assert waited >= STEP_TIMEOUT_S - 1
    assert waited < STEP_TIMEOUT_S + 4
    body = failing.client.get("/readyz").json()
    assert body["status"] == "dead"
    assert "--step-timeout-s" in body["reason"]
    assert failing.client.get("/livez").status_code == 503
    refused = failing.client.post("/v1/completions", json={"prompt": "a"})
    assert refused.json()["error"]["code"] == "engine_failed"
    stream.join(10)
    assert '"code": "engine_failed"' in "".join(out)
    assert failing.process.wait(30) == 1
    assert gone(engine)
    assert "--step-timeout-s" in failing.log.read_text()
