"""Device time of API keys on a real server: the accounts add up to the measured steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

KEYS = ("--api-key", "alice=a,bob=b,carol=c", "--admin-key", "root")
ADMIN = {"authorization": "Bearer root"}
PROMPT = "a long prompt for its chunk and several more words behind it " * 2


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("usage")
    flags = (*KEYS, "--data-dir", str(folder / "data"))
    with RealServer(checkpoints("llama", dtype="float32"), folder, *flags) as up:
        up.until_ready()
        yield up


def _complete(server: RealServer, key: str, prompt: str, tokens: int) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    answer = server.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def _load(server: RealServer) -> None:
    sent = []
    with ThreadPoolExecutor(6) as pool:
        for number in range(24):
            key = ("a", "a", "a", "b", "c", "a")[number % 6]
            prompt, tokens = f"{number} {PROMPT}" if key == "b" else "hi", 10 + 5 * (number % 5)
            sent.append(pool.submit(_complete, server, key, prompt, tokens))
    for answer in sent:
        answer.result()


def _usage(server: RealServer, **query: Any) -> dict[str, Any]:
    answer = server.client.get("/v1/usage", params=query, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _samples(server: RealServer, name: str) -> dict[str, float]:
    lines = server.client.get("/metrics", headers=ADMIN).text.splitlines()
    own = [line.rpartition(" ") for line in lines if line.startswith(f"{name}{{")]
    return {labels: float(value) for labels, _, value in own}


def test_accounts_add_up_to_the_measured_steps(server: RealServer) -> None:
    _load(server)
    # The steps of the last requests are charged when the next one is scheduled.
    time.sleep(0.3)
    measured = sum(_samples(server, "rbln_bucket_step_seconds_sum").values())
    charged = _samples(server, "rbln_device_seconds_total")
    requests = {k: v for k, v in charged.items() if 'kind="request"' in k}
    steps = [v for k, v in charged.items() if 'kind="warmup"' not in k]
    assert sum(steps) == pytest.approx(measured, rel=0.01)
    assert {k for k, v in requests.items() if v} == {
        f'rbln_device_seconds_total{{key="{key}",kind="request",model="tiny"}}'
        for key in ("alice", "bob", "carol")
    }
    usage = _usage(server)
    assert usage["device_seconds"] == pytest.approx(measured, rel=0.01)
    assert usage["idle_seconds"] == pytest.approx(
        usage["ready_seconds"] - usage["device_seconds"], abs=1e-3
    )
    assert usage["warmup_seconds"] > 0
    assert sum(entry["device_seconds"] for entry in usage["data"]) == pytest.approx(
        usage["device_seconds"] + usage["warmup_seconds"], rel=0.001
    )


def test_usage_is_divided_and_selected_as_the_query_says(server: RealServer) -> None:
    _complete(server, "a", "hi", 5)
    by_key = {e["key"]: e["device_seconds"] for e in _usage(server, group_by="key")["data"]}
    assert by_key.keys() >= {"alice"}
    (alice,) = _usage(server, key="alice", group_by="hour,model")["data"]
    assert alice["model"] == "tiny"
    assert alice["start_time"] % 3600 == 0
    assert alice["device_seconds"] == pytest.approx(by_key["alice"], rel=0.2)
    assert _usage(server, end_time=3600)["data"] == []
    wrong = server.client.get("/v1/usage", params={"start_time": "1e9"}, headers=ADMIN)
    assert wrong.status_code == 400
    assert "start_time: must be whole seconds since 1970" in wrong.text


def test_usage_needs_an_admin_key(server: RealServer) -> None:
    for headers, status in ({}, 401), ({"authorization": "Bearer a"}, 403):
        assert httpx.get(f"{server.url}/v1/usage", headers=headers).status_code == status
