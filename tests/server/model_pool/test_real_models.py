"""Two models of which one fits into memory, on a real server."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import FLAGS, RealServer, descendants

pytestmark = pytest.mark.engine

HI: list[Any] = [{"role": "user", "content": "hi"}]
FRONT = ("--api-key", "alice=a", "--admin-key", "root")
MEMORY_GIB = 0.5


def _models_file(checkpoints: CheckpointCache, folder: Path, **limits: float) -> Path:
    entries = [
        {
            "name": name,
            "path": str(checkpoints("llama", dtype="float32", num_hidden_layers=layers)),
            "flags": list(FLAGS[2:]),
            "memory_gib": MEMORY_GIB,
        }
        for name, layers in (("one", 2), ("two", 1))
    ]
    content = {"memory_gib": 1.5 * MEMORY_GIB, "min_resident_s": 0.0, **limits, "models": entries}
    path = folder / "models.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("models")
    file = _models_file(checkpoints, folder)
    data = ("--data-dir", str(folder / "data"), "--min-free-bytes", "0")
    with RealServer(None, folder, "--models", str(file), *FRONT, *data) as up:
        up.until_ready()
        yield up


def _ask(server: RealServer, model: str, key: str = "a", **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": HI, "max_tokens": 4, **fields}
    headers = {"authorization": f"Bearer {key}"}
    return server.client.post("/v1/chat/completions", json=body, headers=headers)


def _models(server: RealServer) -> dict[str, Any]:
    states: dict[str, Any] = server.client.get("/readyz").json()["models"]
    return states


def _chats(server: RealServer, model: str) -> float:
    """The number of chats that the model has answered, of all its processes."""
    page = server.client.get("/metrics", headers={"x-api-key": "a"}).text
    lines = [x for x in page.splitlines() if x.startswith("rbln_http_requests_total{")]
    chats = [x for x in lines if f'model_name="{model}"' in x and "chat/completions" in x]
    return sum(float(line.split()[-1]) for line in chats if 'outcome="ok"' in line)


def test_each_model_answers_by_its_name_and_the_other_one_leaves(server: RealServer) -> None:
    for name, other, chats in (("one", "two", 1), ("two", "one", 1), ("one", "two", 2)):
        answer = _ask(server, name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        states = _models(server)
        assert (states[name]["state"], states[other]["state"]) == ("ready", "asleep")
        assert answer.headers["x-request-id"]
        # Counts continue over the loads of a model.
        assert _chats(server, name) == chats
    assert _chats(server, "two") == 1
    listed = server.client.get("/v1/models", headers={"x-api-key": "a"}).json()["data"]
    assert [card["id"] for card in listed] == ["one", "two"]


def test_an_absent_model_and_a_wrong_key_load_nothing(server: RealServer) -> None:
    before = {name: model["loads"] for name, model in _models(server).items()}
    missing = _ask(server, "three")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert _ask(server, "one", key="wrong").status_code == 401
    unnamed = server.client.post(
        "/v1/chat/completions", json={"messages": HI}, headers={"x-api-key": "a"}
    )
    assert unnamed.json()["error"]["code"] == "missing_field"
    assert {name: model["loads"] for name, model in _models(server).items()} == before


def test_a_stream_that_waits_shows_the_progress_of_the_load(server: RealServer) -> None:
    assert _ask(server, "one").status_code == 200
    body = {"model": "two", "messages": HI, "max_tokens": 4, "stream": True}
    headers = {"x-api-key": "a"}
    with server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        text = "".join(answer.iter_text())
    assert answer.status_code == 200
    assert text.startswith(": loading: phase ")
    assert text.endswith("data: [DONE]\n\n")
    assert "left\n\ndata: {" in text


def test_a_stream_keeps_its_model_until_its_end(server: RealServer) -> None:
    body = {"model": "two", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    later: list[httpx.Response] = []
    assert _ask(server, "two").status_code == 200
    headers = {"x-api-key": "a"}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        other = threading.Thread(target=lambda: later.append(_ask(server, "one")))
        other.start()
        frames = [line for line in lines if line]
    other.join(60)
    assert frames[-1] == "data: [DONE]"
    assert '"completion_tokens":200' in frames[-2]
    assert later[0].json()["model"] == "one"


def test_a_batch_goes_on_after_its_model_has_left(server: RealServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0)
    body = {"model": "two", "prompt": "a", "max_tokens": 60, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body})
        for n in range(40)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    assert _ask(server, "one").json()["model"] == "one"
    assert _models(server)["two"]["state"] == "asleep"
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < until:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 40)
    assert batch.output_file_id is not None
    out = client.files.content(batch.output_file_id).text.splitlines()
    assert {json.loads(line)["response"]["body"]["model"] for line in out} == {"two"}
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.BadRequestError, match="model=NAME"):
        client.batches.list()
    assert [b.id for b in client.batches.list(extra_query={"model": "two"})] == [batch.id]


def test_a_stored_response_is_found_though_its_model_has_left(server: RealServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0)
    first = client.responses.create(model="two", input="hi", max_output_tokens=16)
    assert _ask(server, "one").status_code == 200
    assert client.responses.retrieve(first.id).output == first.output
    later = client.responses.create(
        model="two", input="a", previous_response_id=first.id, max_output_tokens=16
    )
    assert later.previous_response_id == first.id


def test_a_killed_model_is_started_again_and_keeps_its_counts(server: RealServer) -> None:
    assert _ask(server, "two").status_code == 200
    counted = _chats(server, "two")
    assert counted > 0
    loads = _models(server)["two"]["loads"]
    titles = descendants(server.process.pid)
    served = [pid for pid, title in titles.items() if "--served-model-name two" in title]
    assert served, titles
    for pid in served:
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while _models(server)["two"]["state"] == "ready" and time.monotonic() < until:
        time.sleep(0.05)
    answer = _ask(server, "two")
    if answer.status_code == 503:
        assert answer.json()["error"]["code"] == "engine_failed"
        time.sleep(float(answer.headers["retry-after"]))
        answer = _ask(server, "two")
    assert answer.status_code == 200
    assert _models(server)["two"]["loads"] == loads + 1
    assert _chats(server, "two") == counted + 1


def test_an_operator_puts_a_model_to_sleep_and_wakes_it(server: RealServer) -> None:
    root = {"x-api-key": "root"}
    assert server.client.post("/sleep?model=one", headers={"x-api-key": "a"}).status_code == 403
    woken = server.client.post("/wake_up?model=one", headers=root)
    assert woken.json() == {"one": "ready"}
    assert server.client.get("/is_sleeping?model=one", headers=root).json() == {
        "is_sleeping": False
    }
    slept = server.client.post("/sleep?model=one&level=1", headers=root)
    assert (slept.status_code, slept.json()) == (200, {"one": "asleep"})
    assert server.client.get("/is_sleeping", headers=root).json() == {"is_sleeping": True}
    wrong = server.client.post("/sleep?model=one&level=0", headers=root)
    assert wrong.json()["error"]["param"] == "level"


def test_the_end_leaves_no_process(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    file = _models_file(checkpoints, tmp_path, max_wait_s=0.05)
    with RealServer(None, tmp_path, "--models", str(file)) as server:
        server.until_ready()
        waited = server.client.post(
            "/v1/chat/completions", json={"model": "one", "messages": HI, "max_tokens": 4}
        )
        assert waited.status_code == 503
        assert waited.json()["error"]["code"] == "model_loading"
        assert int(waited.headers["retry-after"]) >= 1
        server.client.post("/wake_up?model=one")
        below = descendants(server.process.pid)
        server.terminate()
        assert server.process.wait(30) == 0
    # Fork servers notice the end of their parents.
    until = time.monotonic() + 10
    while (left := [*filter(_runs, below)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == [], {pid: below[pid] for pid in left}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
