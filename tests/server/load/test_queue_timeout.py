"""A real server whose requests may hardly wait: every endpoint says so, before the stream."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.load.test_random_load import until
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

HI = [{"role": "user", "content": "hi"}]
FLAGS = (
    *("--max-model-len", "1024", "--max-queue-s", "0.2", "--max-queued-tokens", "600"),
    *("--scheduling-policy", "priority"),
)


@pytest.fixture(scope="module")
def server(
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


def test_every_endpoint_reports_a_queue_timeout(server: RealServer) -> None:
    requests = [(path, {**body, "stream": s}) for path, body in WAITING for s in (False, True)]
    for path, body in requests:
        # What vLLM makes at its first use must not hold them up below.
        assert server.client.post(path, json={**body, **SHORT.get(path, {})}).status_code == 200
    answers = while_stopped(server, requests, in_flight=2 * (1 + 3 + 2 + 1 + 1))
    for (path, body), answer in zip(requests, answers, strict=True):
        assert answer.status_code == 503, (path, body, answer.text)
        error = answer.json()["error"]
        assert error["code"] == "queue_timeout"
        assert "0.2 s" in error["message"]
        assert "--max-queue-s" in error["message"]
        assert int(answer.headers["retry-after"]) >= 1
    rejected = 'rbln_admission_rejections_total{reason="queue_timeout"}'
    assert server.metric(rejected) == len(requests)
    # Nothing of them is left in the engine, and none of them counts as served.
    once = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert once.status_code == 200
    assert server.metric("vllm:num_requests_waiting{") == 0
    assert server.metric("rbln_kv_blocks_used") == 0
    log = server.log.read_text()
    assert "Traceback" not in log, log


def test_prompts_beyond_the_backlog_are_refused(server: RealServer) -> None:
    requests = [("/v1/completions", {"prompt": [7] * 400, "max_tokens": 1})] * 8
    answers = while_stopped(server, requests, in_flight=2)
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
    assert server.metric(rejected) == len(full)
    assert server.metric("rbln_admission_max_queued_tokens") == 600


def send(server: RealServer, **headers: str) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 1}
    return server.client.post("/v1/completions", json=body, headers=headers)


def test_a_priority_may_come_in_a_header(server: RealServer) -> None:
    assert send(server, **{"X-Vllm-Priority": "-3"}).status_code == 200
    for value in ("high", "1.5", "9" * 30):
        refused = send(server, **{"X-Vllm-Priority": value})
        assert refused.status_code == 400, value
        assert refused.json()["error"]["param"] == "X-Vllm-Priority"
    body = {"prompt": "a", "priority": 10**30}
    assert server.client.post("/v1/completions", json=body).json()["error"]["param"] == "priority"
