"""Two HTTP processes in front of one engine, on real sockets."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import psutil
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer, descendants

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
KEYS = "flood[rpm:20]=a,busy[in-flight:3]=b,plain=c"
FLAGS = ("--api-server-count", "2", "--api-key", KEYS, "--open-metrics", "--max-in-flight", "16")


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("processes")
    with RealServer(
        checkpoints("llama", dtype="float32"),
        folder,
        *FLAGS,
        *("--data-dir", str(folder / "data")),
    ) as up:
        up.until_ready()
        yield up
        up.terminate()
        assert up.process.wait(30) == 0, up.log.read_text()


def _body(tokens: int, **more: Any) -> dict[str, Any]:
    chat = [{"role": "user", "content": "hi"}]
    return {"model": "tiny", "messages": chat, "temperature": 0} | {
        "max_tokens": tokens,
        "min_tokens": tokens,
        **more,
    }


def _post(server: RealServer, key: str, body: dict[str, Any]) -> httpx.Response:
    """Send a request on a connection of its own, which any process may accept."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(server.url + CHAT, json=body, headers=headers, timeout=60)


def _processes(server: RealServer) -> list[int]:
    names = descendants(server.process.pid).items()
    return [pid for pid, name in names if name.startswith("rbln-serve: HTTP process")]


def _requests(server: RealServer) -> Counter[str]:
    """Return the finished chats by status, as /metrics has them."""
    page = server.client.get("/metrics").text.splitlines()
    lines = [x for x in page if x.startswith("rbln_http_requests_total") and f'"{CHAT}"' in x]
    return Counter({x.split('code="')[1][:3]: int(float(x.split()[-1])) for x in lines})


def test_limits_are_exact_and_sums_are_what_clients_counted(server: RealServer) -> None:
    before, started = _requests(server), time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        flood = list(pool.map(lambda _: _post(server, "a", _body(2)), range(60)))
        seconds = time.monotonic() - started
        busy = list(pool.map(lambda _: _post(server, "b", _body(180)), range(9)))
    codes = Counter(answer.status_code for answer in flood)
    # 20 at once, and one more every 3 seconds.
    assert 20 <= codes[200] <= 20 + seconds / 3
    assert codes[200] + codes[429] == 60
    # The first three hold their places for longer than the others take to arrive.
    codes += Counter(answer.status_code for answer in busy)
    assert Counter(answer.status_code for answer in busy)[429] >= 3
    done = _requests(server) - before
    assert done == {str(code): number for code, number in codes.items()}
    page = server.client.get("/metrics").text
    assert 'rbln_key_in_flight{key="busy"} 0.0' in page
    assert "rbln_admission_in_flight 0.0" in page
    answers = [answer for answer in (*flood, *busy) if answer.is_success]
    spent = sum(answer.json()["usage"]["completion_tokens"] for answer in answers)
    # One more is the self-test's of the main process.
    assert server.metric("vllm:generation_tokens_total") == spent + 1


def test_gauges_are_those_of_the_last_step(server: RealServer) -> None:
    """The answers of both processes, and none of them afterwards, without another request."""

    def shown() -> list[float]:
        names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
        return [server.metric(name) for name in names]

    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(_post, server, "c", _body(200)) for _ in range(12)]
        _until(lambda: all(value > 0 for value in shown()))
        assert all(stream.result().is_success for stream in streams)
    _until(lambda: shown() == [0, 0])


def _until(is_met: Callable[[], bool], most_s: float = 10) -> None:
    deadline = time.monotonic() + most_s
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_everything_but_inference_is_the_main_process(server: RealServer) -> None:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer c"}) as client:
        stored = client.post("/v1/responses", json={"model": "tiny", "input": "hi"}).json()
        read = client.get(f"/v1/responses/{stored['id']}")
        assert read.json()["id"] == stored["id"]
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/v1/nothing").status_code == 404
        # The address of the client, not of the process that passed the request on, decides.
        assert client.get("/v1/usage").status_code == 200
    assert httpx.get(server.url + "/v1/models").status_code == 401


def test_a_killed_process_loses_its_own_streams_alone(server: RealServer) -> None:
    expected = _post(server, "c", _body(200)).json()["choices"][0]["message"]["content"]
    before = _requests(server)
    victim, *others = _processes(server)
    assert len(others) == 1
    killed: list[float] = []
    looking = Lock()

    def kill_with_streams() -> None:
        """Kill the process if it has streams; one thread looks, for it is gone afterwards."""
        with looking:
            if killed:
                return
            found = psutil.Process(victim).net_connections("tcp")
            if sum(one.status == psutil.CONN_ESTABLISHED for one in found) >= 2:
                killed.append(time.monotonic())
                os.kill(victim, signal.SIGKILL)

    def stream(_: int) -> str | None:
        headers, text = {"authorization": "Bearer c"}, []
        body = _body(200, stream=True)
        try:
            with httpx.stream(
                "POST", server.url + CHAT, json=body, headers=headers, timeout=60
            ) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if '"content":"' in line:
                        kill_with_streams()
                    if line.startswith("data: {"):
                        choice = json.loads(line.removeprefix("data: "))["choices"][0]
                        text.append(choice["delta"].get("content") or "")
        except httpx.TransportError:
            return None
        return "".join(text)

    with ThreadPoolExecutor(14) as pool:
        ended = list(pool.map(stream, range(14)))
    whole = [text for text in ended if text is not None]
    assert 0 < len(whole) < len(ended)
    assert set(whole) == {expected}
    # Its permits and the engine's requests are gone, its counts are not.
    deadline = time.monotonic() + 60
    while len(_processes(server)) < 2 or "answers again" not in server.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.metric("rbln_admission_in_flight") == 0
    assert server.metric("rbln_serve_in_flight_requests") <= 1
    assert (_requests(server) - before)["200"] == len(whole)
    again = [_post(server, "c", _body(4)).status_code for _ in range(6)]
    assert again == [200] * 6


def test_keys_are_reloaded_and_streams_end_before_all_processes_do(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one=old")
    keys.chmod(0o600)
    flags = ("--api-server-count", "2", "--api-key-file", str(keys), "--open-metrics")
    with RealServer(checkpoints("llama", dtype="float32"), tmp_path, *flags) as up:
        up.until_ready()
        keys.write_text("one=new")

        def codes(key: str) -> set[int]:
            return {_post(up, key, _body(1)).status_code for _ in range(10)}

        _until(lambda: codes("old") == {401} and codes("new") == {200}, most_s=30)
        with ThreadPoolExecutor(6) as pool:
            streams = [pool.submit(_post, up, "new", _body(200)) for _ in range(6)]
            _until(lambda: up.metric("rbln_admission_in_flight") == 6)
            up.terminate()
            answers = [stream.result() for stream in streams]
        spent = [answer.json()["usage"]["completion_tokens"] for answer in answers]
        assert spent == [200] * 6
        assert up.process.wait(30) == 0, up.log.read_text()
