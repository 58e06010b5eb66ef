"""A real server refuses requests whose objectives it cannot meet, before the first byte."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.load.test_random_load import until
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
FLAGS = ("--max-model-len", "1024", "--prefill-policy", "fcfs")
HI = [{"role": "user", "content": "hi"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/chat/completions", {"messages": HI, "n": 2, "stream": True}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "stream": True}),
]


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    model = checkpoints("llama", dtype="float32")
    with RealServer(model, tmp_path_factory.mktemp("s"), *FLAGS) as up:
        up.until_ready()
        # Until a step of each phase has run, nothing is predicted.
        assert complete(up, [9] * 70, {TTFT: "0.001"}).status_code == 200
        yield up


def complete(
    server: RealServer, prompt: list[int], headers: dict[str, str], tokens: int = 4
) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    answer: httpx.Response = server.client.post("/v1/completions", json=body, headers=headers)
    return answer


def predicted_ms(answer: httpx.Response) -> float:
    assert answer.status_code == 429, answer.text
    error = answer.json()["error"]
    assert error["code"] == "objective_missed"
    found = re.search(r"after ([\d.]+) ms; the objective is", error["message"])
    assert found is not None, error
    return float(found[1])


@pytest.mark.parametrize(("path", "fields"), REQUESTS)
def test_every_endpoint_refuses_before_the_first_byte(
    server: RealServer, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": "tiny", **fields, **({"max_tokens": 4} if "responses" not in path else {})}
    for name, value in ((TTFT, "0.001"), (TPOT, "0.001")):
        answer = server.client.post(path, json=body, headers={name: value})
        assert answer.status_code == 429, answer.text
        assert name in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    assert server.client.post(path, json=body, headers={TTFT: "600000"}).status_code == 200


def test_prompts_in_progress_count(server: RealServer) -> None:
    def pace() -> list[float]:
        return [server.metric(f"rbln_objective_token_ratio_{name}") for name in ("count", "sum")]

    before = pace()
    idle = predicted_ms(complete(server, [5] * 8, {TTFT: "0.001"}))
    with ThreadPoolExecutor(8) as pool:
        long = [pool.submit(complete, server, [10 + i] * 900, {}, 100) for i in range(8)]
        until(lambda: server.metric("rbln_admission_in_flight") == 8, timeout_s=20)
        behind = predicted_ms(complete(server, [6] * 8, {TTFT: str(2 * idle + 1)}))
        assert behind > 2 * idle
        assert complete(server, [7] * 8, {TTFT: "600000"}).status_code == 200
        assert all(task.result().status_code == 200 for task in long)
    assert server.metric('rbln_admission_rejections_total{reason="objective"}') >= 2
    assert server.metric("rbln_objective_first_token_ratio_count") >= 1
    # Of the one that was admitted with an objective. Steps with fewer rows than predicted are
    # faster, chunks between them are not predicted.
    count, total = pace()
    assert count == before[0] + 1
    assert 0.1 < total - before[1] < 1000


@pytest.mark.parametrize("name", [TTFT, TPOT])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "1e9", "1000000000"])
def test_other_values_are_refused(server: RealServer, name: str, value: str) -> None:
    answer = complete(server, [5], {name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert repr(value) in answer.json()["error"]["message"]
