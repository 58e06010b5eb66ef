"""POST /reset_prefix_cache, and the routes of other hosts' probes: /ping and /load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.server.scripted import ScriptedLauncher, running

RESET = "/reset_prefix_cache"


async def test_running_requests_are_preempted_on_request_only(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        queries = ("", "?reset_running_requests=true", "?reset_external=true")
        for query, success in zip(queries, (False, True, False), strict=True):
            answer = await service.client.post(RESET + query)
            assert (answer.status_code, answer.json()) == (200, {"success": success})
        assert service.frontend.resets == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize("name", ["reset_running_requests", "reset_external"])
async def test_other_values_are_refused(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(f"{RESET}?{name}=yes")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (name, "invalid_value")
        assert service.frontend.resets == []


async def test_it_needs_the_admin_key(tmp_path: Path) -> None:
    async with running(tmp_path, admin_key=("secret-of-admins",), api_key=("sk",)) as service:
        assert (await service.client.post(RESET)).status_code == 401
        with_key = {"authorization": "Bearer sk"}
        assert (await service.client.post(RESET, headers=with_key)).status_code == 403


async def test_ping_is_a_probe_and_load_counts_requests(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    async with running(tmp_path, launcher) as service:
        assert (await service.client.get("/ping")).status_code == 503
    async with running(tmp_path) as service:
        for method in ("GET", "POST"):
            assert (await service.client.request(method, "/ping")).status_code == 200
        assert (await service.client.get("/load")).json() == {"server_load": 0}
        stream = asyncio.create_task(
            service.client.post("/v1/chat/completions", json={"do": "wait", "stream": True})
        )
        while (await service.client.get("/load")).json() != {"server_load": 1}:
            await asyncio.sleep(0.01)
        service.frontend.go_on.set()
        await stream
