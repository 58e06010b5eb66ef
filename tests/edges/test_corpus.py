"""The corpus against a real server: refused or answered, nobody is held up, memory comes back."""

import http.client
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import pytest

from tests.checkpoints import CheckpointCache
from tests.edges.corpus import Case, cases
from tests.edges.loop_probe import LoopProbe, own_bytes
from tests.pooling_checkpoints import sentence_transformer
from tests.server.real_server import RealServer, descendants

# Seconds and bytes are compared: these need a quiet machine.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.wide]

HELD_S = 0.1
"""Seconds that the loop may be held on a quiet machine; a case that is over it is tried again."""
TRIES = 4
GROWTH_BYTES = {"serve": 96 << 20, "reading requests": 192 << 20}
"""Memory that allocators may keep after all requests, by process; the first kept 66 MiB once."""
MAX_ERROR_BYTES = 4096

Start = Callable[[bool], RealServer]


@pytest.fixture(scope="module")
def start(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Starts a server, for a model that pools or one that generates; each once."""
    running: dict[bool, RealServer] = {}

    def server(pooling: bool) -> RealServer:
        if pooling not in running:
            folder = tmp_path_factory.mktemp("s")
            if pooling:
                model = sentence_transformer(checkpoints("qwen3"), folder / "model")
            else:
                model = checkpoints("llama", dtype="float32")
            running[pooling] = RealServer(model, folder, "--max-model-len", "256", own_imports=True)
            running[pooling].until_ready()
        return running[pooling]

    yield server
    for up in running.values():
        up.__exit__(None, None, None)


@pytest.mark.timeout(300)
def test_nothing_found_so_far_holds_the_loop(start: Start) -> None:
    some = [case for case in cases((10_000,), pooling=False) if _is_telling(case)]
    assert len(some) > 150
    _attack(start(False), some)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pooling", [False, True], ids=["generating", "pooling"])
def test_no_field_of_any_route_holds_the_loop(start: Start, pooling: bool) -> None:
    _attack(start(pooling), cases(pooling=pooling))


def _is_telling(case: Case) -> bool:
    return ": " not in case.name or case.name.endswith((" objects", " turns", " a text of 10000"))


def _attack(server: RealServer, some: Iterable[Case]) -> None:
    port = server.client.base_url.port
    assert port is not None
    # The process that reads large bodies starts with the first of them at the latest.
    for case in islice(cases((10_000,), pooling=False), 3):
        _send(port, case)
    before = _memory(server)
    held: dict[str, float] = {}
    faults: list[str] = []
    number, worst = 0, 0.0
    with LoopProbe(port) as probe:
        for case in some:
            number += 1
            probe.take_worst_s()
            for _ in range(TRIES):
                status, answer = _send(port, case)
                seconds = probe.take_worst_s()
                if seconds <= HELD_S:
                    break
            worst = max(worst, seconds)
            if seconds > HELD_S:
                held[case.name] = seconds
            if fault := _fault(status, answer):
                faults.append(f"{case.name}: {fault}")
    after = _memory(server)
    grown = {name: after[name] - before[name] for name in before}
    told = ", ".join(f"{name} {size / 2**20:+.0f} MiB" for name, size in grown.items())
    print(f"{number} cases, worst /livez {worst * 1000:.0f} ms, {told}")  # noqa: T201
    assert not faults, "\n".join(faults[:20])
    assert not held, held
    assert all(grown[name] < limit for name, limit in GROWTH_BYTES.items()), told
    assert "Traceback" not in server.log.read_text()


def _send(port: int, case: Case) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", case.path, case.body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _fault(status: int, answer: bytes) -> str | None:
    if status == 200:
        return None
    if status >= 500 or len(answer) > MAX_ERROR_BYTES:
        return f"{status}, {len(answer)} bytes: {answer[:200]!r}"
    error = json.loads(answer)["error"]
    return None if isinstance(error["code"], str) else f"no code: {answer[:200]!r}"


def _memory(server: RealServer) -> dict[str, int]:
    """The memory of the process that listens and of the one that reads, in bytes."""
    names = descendants(server.process.pid)
    (reading,) = (pid for pid, name in names.items() if "reading requests" in name)
    return {"serve": own_bytes(server.process.pid), "reading requests": own_bytes(reading)}
