"""Shadow parity on a real server: no answer differs, and a fault in one kernel is found."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.audit.log_files import log_files
from tests.adapters import make_adapter
from tests.checkpoints import CheckpointCache
from tests.server.faulty_scheduler import FAULTY
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}'
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: list[tuple[str, dict[str, Any], int]] = [
    (CHAT, {"messages": HI, "max_tokens": 9, "temperature": 0}, 1),
    (CHAT, {"messages": HI, "max_tokens": 9, "temperature": 1, "seed": 4, "n": 3}, 3),
    (CHAT, {"messages": HI, "max_tokens": 40, "response_format": FORM, "seed": 5}, 1),
    (TEXT, {"prompt": ["a b a b", "c"], "max_tokens": 20, "stop": ["e"], "temperature": 0}, 2),
    (TEXT, {"prompt": "a", "max_tokens": 9, "model": "blue", "temperature": 2, "seed": 1}, 1),
    (TEXT, {"prompt": "a b a b a b", "max_tokens": 30, "temperature": 0, "ignore_eos": True}, 1),
    (CHAT, {"messages": HI, "max_tokens": 9, "temperature": 1}, 1),
]
"""Route, body and answers. With the audit log, unseeded answers get a seed."""
ROUNDS = 4
NUM_ANSWERS = ROUNDS * sum(count for _, _, count in BODIES)


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("shadow")
    checkpoint = checkpoints("llama", dtype="float32")
    flags = ["--shadow-rate", "1", "--audit-log", str(folder / "audit"), "--enable-lora"]
    flags += ["--lora-modules", f"blue={make_adapter(checkpoint, folder / 'blue')}"]
    flags += ["--speculative-config", DRAFTS]
    flags += ["--scheduler-cls", "tests.server.faulty_scheduler.FaultyScheduler"]
    with RealServer(checkpoint, folder, *flags) as up:
        up.until_ready()
        yield up


def _results(server: RealServer) -> dict[str, float]:
    name = "rbln_shadow_answers_total"
    return {r: server.metric(f'{name}{{result="{r}"}}') for r in ("same", "different", "dropped")}


def _until(server: RealServer, compared: int) -> dict[str, float]:
    """Return the results once `compared` answers were compared."""
    end = time.monotonic() + 60
    while sum((found := _results(server)).values()) < compared:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def _post(server: RealServer, route: str, body: dict[str, Any]) -> None:
    answer = server.client.post(route, json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text


def test_no_answer_of_a_mixed_load_differs(server: RealServer) -> None:
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda b: _post(server, b[0], b[1]), BODIES * ROUNDS))
    assert _until(server, NUM_ANSWERS) == {"same": NUM_ANSWERS, "different": 0, "dropped": 0}
    seconds = 'rbln_device_seconds_total{key="",kind="shadow",model="tiny"}'
    assert server.metric(seconds) > 0
    # vLLM counts clients' requests alone.
    lines = server.client.get("/metrics").text.splitlines()
    finished = [x for x in lines if x.startswith("vllm:request_success_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in finished) <= NUM_ANSWERS + 1


def test_a_fault_in_one_kernel_is_found(server: RealServer, tmp_path: Path) -> None:
    before = sum(_results(server).values())
    body = {"prompt": [FAULTY, 5, 6], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    for _ in range(6):
        _post(server, TEXT, body)
    found = _until(server, int(before) + 6)
    # The expression of RblnShadowMismatch: the counter has risen.
    assert found["different"] > 0
    line = next(x for x in server.log.read_text().splitlines() if "Shadow parity:" in x)
    assert "differs at token" in line
    (file,) = log_files(server.log.parent / "audit")
    end = time.monotonic() + 10
    while not (records := [r for r in map(json.loads, file.open()) if r["kind"] == "shadow"]):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert records[0]["live"]["id"] != records[0]["again"]["id"]
    assert records[0]["live"]["logprob"] <= 0
    assert records[0]["again"]["logprob"] <= 0
