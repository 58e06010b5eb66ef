"""Abuse of a real server: clients that vanish, fifty times the load, an engine that hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.load.test_random_load import until
from tests.server.real_server import RealServer
from tests.server.test_real_server_end import gone, in_flight

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MAX_NUM_SEQS = 4
NUM_STREAMS = 200
STEP_TIMEOUT_S = 4
STREAM = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True}
SHORT = {**STREAM, "n": 4, "max_tokens": 20, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server(
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


def test_two_hundred_streams_that_are_cut_leave_nothing(server: RealServer) -> None:
    async def open_and_cut() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        content = json.dumps(STREAM).encode()
        request = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(content), content)
        )
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(NUM_STREAMS)]
        for _, writer in streams:
            writer.write(request)
        await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in streams[:2]))
        while server.metric("rbln_admission_in_flight") < NUM_STREAMS:
            await asyncio.sleep(0.02)
        for _, writer in streams:
            writer.transport.abort()

    asyncio.run(open_and_cut())
    until(lambda: at_rest(server), timeout_s=20)
    answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200


async def one_answer(client: httpx.AsyncClient, counts: Counter[str]) -> None:
    """Send one stream and check that what comes is whole, or a refusal that says when."""
    async with client.stream("POST", "/v1/completions", json=SHORT) as answer:
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


def test_fifty_times_the_capacity_gets_an_answer_each(server: RealServer) -> None:
    number = 50 * MAX_NUM_SEQS
    counts: Counter[str] = Counter()

    async def storm() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one_answer(client, counts) for _ in range(number)))

    asyncio.run(storm())
    assert counts.total() == number
    # Each asks for four answers, and so many may be in flight.
    assert counts["200"] >= NUM_STREAMS / 4
    assert counts["429"] > counts["200"]
    rejected = 'rbln_admission_rejections_total{reason="in_flight"}'
    assert server.metric(rejected) == counts["429"]
    until(lambda: at_rest(server), timeout_s=20)


def test_a_hung_engine_is_killed_and_reported(server: RealServer) -> None:
    """The last test of this module: its server ends."""
    out: list[str] = []
    engine = server.engine_pid()
    stream = in_flight(server, out)
    stopped = time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    while server.client.get("/readyz").status_code == 200:
        time.sleep(0.05)
    waited = time.monotonic() - stopped
    assert waited >= STEP_TIMEOUT_S - 1
    assert waited < STEP_TIMEOUT_S + 4
    body = server.client.get("/readyz").json()
    assert body["status"] == "dead"
    assert "--step-timeout-s" in body["reason"]
    assert server.client.get("/livez").status_code == 503
    refused = server.client.post("/v1/completions", json={"prompt": "a"})
    assert refused.json()["error"]["code"] == "engine_failed"
    stream.join(10)
    assert '"code": "engine_failed"' in "".join(out)
    assert server.process.wait(30) == 1
    assert gone(engine)
    assert "--step-timeout-s" in server.log.read_text()
