"""A service of several ranks ends as a whole, whichever of its processes is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer, descendants
from tests.server.test_real_server_end import gone, in_flight

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.wide]

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


@pytest.mark.parametrize("flags", [TENSOR, PIPELINE, DATA])
def test_nothing_survives_a_killed_server(
    checkpoints: CheckpointCache, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with start(checkpoints, tmp_path, *flags) as server:
        server.until_ready()
        processes = descendants(server.process.pid)
        server.process.kill()
        until_all_gone(processes, 10)
