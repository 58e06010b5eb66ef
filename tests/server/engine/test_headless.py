"""A server with the API and a headless one, which shares its data-parallel engines."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = {"model": "tiny", "prompt": [5, 17, 3, 99, 4], "max_tokens": 12, "temperature": 0}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def pair(checkpoints: CheckpointCache, tmp_path: Path) -> Iterator[tuple[RealServer, RealServer]]:
    """The server with the API and the headless one, starting."""
    flags = [
        *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
        *("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())),
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
