"""Ends of the real server: drained, its engine killed, killed itself."""

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.faulty_scheduler import FORGOTTEN
from tests.server.real_server import RealServer, descendants

pytestmark = pytest.mark.engine

ENDLESS: dict[str, Any] = {"ignore_eos": True, "stream": True}
LONG = {"prompt": "a", "max_tokens": 1000, "n": 4, **ENDLESS}
HI = [{"role": "user", "content": "a"}]
STREAMS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 900, **ENDLESS},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 900, **ENDLESS},
    "/v1/responses": {"input": "a", "max_output_tokens": 900, **ENDLESS},
}
"""One for each kind of stream that can be made endless."""


@pytest.fixture
def server(checkpoints: CheckpointCache, tmp_path: Path) -> RealServer:
    # Streams must last long enough for something to happen meanwhile.
    return RealServer(checkpoints("llama", dtype="float32"), tmp_path, "--max-model-len", "1024")


def in_flight(
    server: RealServer, out: list[str], path: str = "/v1/completions", body: dict[str, Any] = LONG
) -> threading.Thread:
    """Start a long stream in a thread and return once its first bytes are here."""
    begun = threading.Event()

    def run() -> None:
        with server.client.stream("POST", path, json=body) as answer:
            for text in answer.iter_text():
                out.append(text)
                begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(30)
    return thread


def error_codes(stream: str) -> list[str]:
    """The codes of a stream's error events, each in an object named ``error``."""
    frames = re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)
    events = [json.loads(frame) for frame in frames]
    return [event["error"]["code"] for event in events if "error" in event]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_sigterm_finishes_streams_refuses_new_work_and_exits_0(server: RealServer) -> None:
    with server:
        server.until_ready()
        engine = server.engine_pid()
        out: list[str] = []
        stream = in_flight(server, out)
        server.terminate()
        while server.client.get("/readyz").status_code == 200:
            time.sleep(0.001)
        refused = server.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["connection"] == "close"
        assert stream.is_alive()
        stream.join(60)
        text = "".join(out)
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"finish_reason":"length"') == 4
        assert server.process.wait(30) == 0
        assert gone(engine)
        ours = [x for x in server.log.read_text().splitlines() if not x.startswith("(EngineCore")]
        assert not any("Traceback" in line for line in ours)
        assert not list(server.log.parent.glob("rbln-serve-*"))


def test_a_killed_engine_is_noticed(server: RealServer) -> None:
    with server:
        server.until_ready()
        # The first request of a kind takes longer than a whole stream on a fast machine: each has
        # one before, and all streams begin at once.
        for path, body in STREAMS.items():
            with server.client.stream("POST", path, json=body) as answer:
                next(answer.iter_text())
        received: dict[str, list[str]] = {path: [] for path in STREAMS}
        with ThreadPoolExecutor(len(STREAMS)) as pool:
            begun = [
                pool.submit(in_flight, server, received[path], path, body)
                for path, body in STREAMS.items()
            ]
            streams = [future.result() for future in begun]
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert "exit code -9" in server.reason_of_death()
        for stream, (path, texts) in zip(streams, received.items(), strict=True):
            stream.join(10)
            assert error_codes("".join(texts)) == ["engine_failed"], path
        assert server.process.wait(30) == 1
        assert "exit code -9" in server.log.read_text()


def kill(server: RealServer, tmp_path: Path) -> Path:
    """Kill a server, which leaves no process behind, and return the folder that it leaves."""
    # Another process tries the grammar.
    guided = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": ["a"]}}
    assert server.client.post("/v1/completions", json=guided).status_code == 200
    left = descendants(server.process.pid)
    assert len(left) >= 3
    server.process.kill()
    deadline = time.monotonic() + 10
    while alive := {pid: title for pid, title in left.items() if not gone(pid)}:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)
    (abandoned,) = tmp_path.glob("rbln-serve-*")
    return abandoned


@pytest.mark.wide
def test_nothing_survives_a_killed_server_that_spawns_its_engine(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    spawn = ("--engine-start", "spawn")
    checkpoint = checkpoints("llama", dtype="float32")
    with RealServer(checkpoint, tmp_path, *spawn, own_imports=True) as server:
        server.until_ready()
        abandoned = kill(server, tmp_path)
    with RealServer(checkpoint, tmp_path, *spawn):
        assert not abandoned.exists()


def test_a_second_signal_ends_it_at_once_and_streams_with_a_word(server: RealServer) -> None:
    with server:
        server.until_ready()
        out: list[str] = []
        stream = in_flight(server, out)
        server.terminate()
        while server.client.get("/readyz").status_code == 200:
            time.sleep(0.001)
        server.terminate()
        # A second on an idle host; without the second signal it waits for 25 s.
        assert server.process.wait(10) == 0
        stream.join(10)
        text = "".join(out)
        assert '"code": "draining"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("how", ["forkserver", pytest.param("spawn", marks=pytest.mark.wide)])
def test_the_end_of_who_reads_the_log_is_not_the_servers(
    checkpoints: CheckpointCache, tmp_path: Path, how: str
) -> None:
    log = tmp_path / "pipe"
    os.mkfifo(log)
    begun = threading.Event()

    def read_a_line() -> None:
        # As `| grep -m 1 'listening on'` does.
        with log.open() as pipe:
            line = next(line for line in pipe if "listening on" in line)
        (tmp_path / "server.log").write_text(line)
        begun.set()

    threading.Thread(target=read_a_line).start()
    checkpoint = checkpoints("llama", dtype="float32")
    with RealServer(checkpoint, tmp_path, "--engine-start", how, output=log) as server:
        assert begun.is_set()
        server.until_ready()
        answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200
        server.terminate()
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_sigterm_during_start_up_ends_promptly_with_0(server: RealServer, delay_s: float) -> None:
    with server:
        time.sleep(delay_s)
        server.terminate()
        assert server.process.wait(10) == 0


def test_an_engine_that_runs_no_step_for_a_request_is_killed(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """It answers calls, and other requests run: that is no hang of the process."""
    stalls = ("--scheduler-cls", "tests.server.faulty_scheduler.StallingScheduler")
    model = checkpoints("llama", dtype="float32")
    with RealServer(model, tmp_path, "--step-timeout-s", "4", *stalls) as server:
        server.until_ready()
        out: list[httpx.Response] = []
        body = {"prompt": [FORGOTTEN, 5, 6], "max_tokens": 3}
        waits = threading.Thread(
            target=lambda: out.append(server.client.post("/v1/completions", json=body))
        )
        waits.start()
        for _ in range(3):
            other = server.client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 3})
            assert other.status_code == 200
        reason = server.reason_of_death()
        # The watch looks a few times a second, later on a busy machine.
        assert re.search(r"has 1 requests and ran no step for [4-9] s, the limit of --step", reason)
        waits.join(20)
        assert out[0].json()["error"]["code"] == "engine_failed"
        assert server.process.wait(30) == 1
        assert "No step ran for these requests: cmpl-" in server.log.read_text()
