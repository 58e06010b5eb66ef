"""A server with the API and a headless one, which shares its data-parallel engines."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from tests.checkpoints import CheckpointCache
from tests.ports import free_port
from tests.server.real_server import RealServer, descendants
from tests.server.test_real_server_end import gone, in_flight

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = {"model": "tiny", "prompt": [5, 17, 3, 99, 4], "max_tokens": 12, "temperature": 0}


JUNK = [
    [b"ENGINE_CORE_DEAD"],
    [b"junk"],
    [b"a", b"b", b"c"],
    # Outputs of an engine that is not there, and the result of a call that nobody made.
    [msgspec.msgpack.encode([7])],
    [msgspec.msgpack.encode([0, [], None, 1.0, [5, None, None]])],
]


@pytest.fixture
def pair(checkpoints: CheckpointCache, tmp_path: Path) -> Iterator[tuple[RealServer, RealServer]]:
    """The server with the API and the headless one, starting."""
    flags = [
        *"--data-parallel-size 2 --data-parallel-size-local 1".split(),
        "--data-parallel-address",
        "127.0.0.1",
        "--data-parallel-rpc-port",
        str(free_port()),
    ]
    model = checkpoints("llama", dtype="float32")
    folders = [tmp_path / name for name in ("api", "headless")]
    for folder in folders:
        folder.mkdir()
    api = RealServer(model, folders[0], *flags)
    rank = ("--headless", "--data-parallel-start-rank", "1")
    with api, RealServer(model, folders[1], *flags, *rank) as other:
        yield api, other


def answer(server: RealServer, rank: int) -> str:
    got = server.client.post(
        "/v1/completions", json=PROMPT, headers={"X-data-parallel-rank": str(rank)}
    )
    assert got.status_code == 200, got.text
    return str(got.json()["choices"][0]["text"])


def listening_ports(server: RealServer) -> set[int]:
    """Return the ports of the server's own process and of its coordinator, without its API's."""
    owners = [psutil.Process(server.process.pid)]
    children = owners[0].children(recursive=True)
    owners += [one for one in children if "Coordinator" in " ".join(one.cmdline())]
    return {
        connection.laddr.port
        for owner in owners
        for connection in owner.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    } - {int(server.url.rpartition(":")[2])}


def visit(port: int) -> None:
    """Do what a port scan, a web client and a program with ZeroMQ do."""
    for greeting in (b"", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
    with zmq.Context() as context:
        for kind in (zmq.DEALER, zmq.PUSH, zmq.XSUB):
            with context.socket(kind) as peer:
                peer.setsockopt(zmq.LINGER, 300)
                peer.setsockopt(zmq.SNDTIMEO, 300)
                peer.connect(f"tcp://127.0.0.1:{port}")
                for junk in JUNK:
                    with suppress(zmq.Again):
                        peer.send_multipart(junk)


def test_a_headless_engine_answers_for_the_api_and_ends_with_it(
    pair: tuple[RealServer, RealServer],
) -> None:
    api, other = pair
    api.until_ready()
    other.until_ready()
    assert answer(api, 0) == answer(api, 1)
    computed = "rbln_bucket_useful_rows_total"
    assert api.metric(computed) > 0
    assert other.metric(computed) > 0
    ports = listening_ports(api)
    assert len(ports) >= 4, ports
    for port in ports:
        visit(port)
    time.sleep(1.5)
    assert api.process.poll() is None, api.log.read_text()
    assert answer(api, 0) == answer(api, 1)
    assert api.client.get("/readyz").status_code == 200
    log = api.log.read_text()
    for where in ("the engines' input port", "the engines' output port", "the coordinator's port"):
        assert f"ignored a message to {where}" in log, log
    refused = other.client.post("/v1/completions", json=PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "headless")
    assert "127.0.0.1" in refused.json()["error"]["message"]
    assert other.client.get("/v1/models").json()["data"] == []
    os.kill(api.process.pid, signal.SIGKILL)
    assert other.process.wait(20) == 1
    assert "has closed its connection" in other.log.read_text()


@pytest.mark.wide
def test_the_api_ends_with_a_headless_engine(pair: tuple[RealServer, RealServer]) -> None:
    api, other = pair
    api.until_ready()
    os.kill(other.engine_pid(), signal.SIGKILL)
    assert other.process.wait(20) == 1
    assert api.process.wait(20) == 1
    assert "engine of another host has closed its connection" in api.log.read_text()


@pytest.mark.parametrize(
    ("size", "start", "local", "message"),
    [
        ("2", "0", "1", "--data-parallel-start-rank 0"),
        ("3", "2", "2", "must be 1 to 1"),
        ("2", "1", "2", "--data-parallel-size-local 2 of --data-parallel-size 2"),
    ],
)
def test_engines_that_no_api_would_use_are_refused(
    checkpoints: CheckpointCache, tmp_path: Path, size: str, start: str, local: str, message: str
) -> None:
    flags = ("--data-parallel-size", size, "--data-parallel-size-local", local)
    rank = ("--headless", "--data-parallel-start-rank", start)
    with RealServer(checkpoints("llama", dtype="float32"), tmp_path, *flags, *rank) as server:
        assert server.process.wait(60) == 2
        assert message in server.log.read_text()


# --------------------------------------------------------------------------------------- rank death
TENSOR = ("--tensor-parallel-size", "2")
PIPELINE = ("--pipeline-parallel-size", "2")
DATA = ("--data-parallel-size", "2")
# What is there of a service; the number is its place among those of its kind.
ENGINE, RANK = "EngineCore", "Worker"


def shared_memory(processes: dict[int, str]) -> set[Path]:
    """Files under /dev/shm that the processes have mapped."""
    return {
        Path(line.split()[5])
        for pid in processes
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line and "(deleted)" not in line
    }


def start(checkpoints: CheckpointCache, tmp_path: Path, *flags: str) -> RealServer:
    model = checkpoints("llama", dtype="float32")
    return RealServer(model, tmp_path, "--max-model-len", "1024", *flags)


def until_all_gone(processes: dict[int, str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while left := {pid: name for pid, name in processes.items() if not gone(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("flags", "kind", "place"),
    [
        (TENSOR, RANK, 0),
        (TENSOR, RANK, 1),
        (TENSOR, ENGINE, 0),
        (PIPELINE, RANK, 0),
        (PIPELINE, RANK, 1),
        (DATA, ENGINE, 1),
    ],
)
def test_a_killed_process_under_load(
    checkpoints: CheckpointCache, tmp_path: Path, flags: tuple[str, ...], kind: str, place: int
) -> None:
    with start(checkpoints, tmp_path, *flags) as server:
        server.until_ready()
        processes = descendants(server.process.pid)
        shared = shared_memory(processes)
        out: list[str] = []
        stream = in_flight(server, out)
        victim = sorted(pid for pid, name in processes.items() if kind in name)[place]
        os.kill(victim, signal.SIGKILL)
        assert server.process.wait(40) == 1, server.log.read_text()
        stream.join(10)
        assert "engine_failed" in "".join(out)
        until_all_gone(processes, 5)
        assert not [path for path in shared if path.exists()]
    # The next start finds every graph of every rank.
    with start(checkpoints, tmp_path, *flags) as server:
        server.until_ready()
        assert server.metric('rbln_compile_cache_requests_total{result="miss"') == 0
        assert server.metric('rbln_compile_cache_requests_total{result="hit"') > 0


@pytest.mark.wide
@pytest.mark.parametrize("flags", [TENSOR, PIPELINE, DATA])
def test_nothing_survives_a_killed_server(
    checkpoints: CheckpointCache, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with start(checkpoints, tmp_path, *flags) as server:
        server.until_ready()
        processes = descendants(server.process.pid)
        server.process.kill()
        until_all_gone(processes, 10)
