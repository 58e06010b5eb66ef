"""POST /start_profile and /stop_profile: there when the profiler was switched on, else refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer
from tests.server.scripted import ScriptedProfiler, running

START, STOP = "/start_profile", "/stop_profile"


async def test_a_profile_is_started_and_stopped(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        service.frontend.profiler = profiler = ScriptedProfiler()
        for path in (START, STOP):
            answer = await service.client.post(path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert profiler.calls == ["start", "stop"]


async def test_without_a_profiler_it_says_how_to_get_one(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        for path in (START, STOP):
            answer = await service.client.post(path)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "unsupported_operation"
            assert "RBLN_PROFILER=1" in error["message"]


async def test_it_is_for_who_may_change_the_server(tmp_path: Path) -> None:
    async with running(tmp_path, admin_key=("secret-of-admins",), api_key=("sk",)) as service:
        service.frontend.profiler = profiler = ScriptedProfiler()
        with_key = {"authorization": "Bearer sk"}
        assert (await service.client.post(START)).status_code == 401
        assert (await service.client.post(START, headers=with_key)).status_code == 403
        assert not profiler.calls


@pytest.mark.engine
def test_a_real_engine_writes_what_it_ran(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    cache = {"rbln": {"profiler": True, "cache_root": str(tmp_path / "cache"), "kernels": "aten"}}
    flags = ("--additional-config", json.dumps(cache))
    with RealServer(checkpoints("llama"), tmp_path, *flags) as server:
        server.until_ready()
        assert server.client.post(START).status_code == 200
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        assert server.client.post(STOP).status_code == 200
        (trace,) = (tmp_path / "cache" / "rbln" / "profile").iterdir()
        assert json.loads(trace.read_text())["traceEvents"]
