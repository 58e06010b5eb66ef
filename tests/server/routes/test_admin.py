"""Taking the service out and back: POST /admin/drain and /admin/undrain."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.scripted import Running, ScriptedLauncher, running

CHAT = "/v1/chat/completions"
DRAIN, UNDRAIN = "/admin/drain", "/admin/undrain"


async def busy(service: Running) -> asyncio.Task[httpx.Response]:
    task = asyncio.create_task(service.client.post(CHAT, json={"do": "wait", "stream": True}))
    while await service.metric("rbln_serve_in_flight_requests") < 1:
        await asyncio.sleep(0.01)
    return task


async def test_a_drain_refuses_new_work_and_finishes_the_old(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        stream = await busy(service)
        answer = await service.client.post(DRAIN)
        assert answer.status_code == 202
        assert answer.json()["status"] == "draining"
        assert answer.json()["in_flight"] == 1
        ready = await service.client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "POST /admin/drain"
        assert (await service.client.get("/livez")).status_code == 200
        refused = await service.client.post(CHAT, json={"do": "answer"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert "retry-after" in refused.headers
        service.frontend.go_on.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        again = await service.client.post(DRAIN, json={"wait": True})
        assert (again.status_code, again.json()["in_flight"]) == (200, 0)
        assert not service.exit_code.done()
        back = await service.client.post(UNDRAIN)
        assert (back.status_code, back.json()["status"]) == (200, "ready")
        assert (await service.client.get("/readyz")).status_code == 200
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200
        assert (await service.client.post(UNDRAIN)).status_code == 200


async def test_a_drain_can_wait_for_the_last_byte(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        stream = await busy(service)
        early = await service.client.post(DRAIN, json={"wait": True, "timeout_s": 0.1})
        assert (early.status_code, early.json()["in_flight"]) == (202, 1)
        waiting = asyncio.create_task(service.client.post(DRAIN, json={"wait": True}))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        service.frontend.go_on.set()
        assert (await waiting).status_code == 200
        await stream


async def test_a_signal_ends_what_an_admin_began(tmp_path: Path) -> None:
    async with running(tmp_path, drain_timeout_s=60) as service:
        stream = await busy(service)
        await service.client.post(DRAIN)
        service.signal()
        while (await service.client.get("/readyz")).json()["reason"] != "SIGTERM":
            await asyncio.sleep(0.01)
        back = await service.client.post(UNDRAIN)
        assert back.status_code == 503
        assert back.json()["error"]["code"] == "draining"
        assert (await service.client.post(DRAIN)).status_code == 202
        service.frontend.go_on.set()
        await stream
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 0


async def test_the_death_of_a_drained_engine_is_still_reported(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        await service.client.post(DRAIN)
        service.launcher.engine.death = "engine process ended with exit code -9"
        while (await service.client.get("/readyz")).json()["status"] != "dead":
            await asyncio.sleep(0.01)
        refused = await service.client.post(UNDRAIN)
        assert refused.json()["error"]["code"] == "engine_failed"
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 1


async def test_a_service_that_starts_cannot_be_drained(tmp_path: Path) -> None:
    async with running(tmp_path, ScriptedLauncher()) as service:
        refused = await service.client.post(DRAIN)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "not_ready"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"wait": 1}, "invalid_type", "wait"),
    ({"wait": True, "timeout_s": "5"}, "invalid_type", "timeout_s"),
    ({"wait": True, "timeout_s": True}, "invalid_type", "timeout_s"),
    ({"wait": True, "timeout_s": 0}, "invalid_value", "timeout_s"),
    ({"wait": True, "timeout_s": 3601}, "invalid_value", "timeout_s"),
    ({"timeout_s": 5}, "invalid_value", "timeout_s"),
    ({"waits": True}, "unknown_field", "waits"),
]


@pytest.mark.parametrize(("body", "code", "param"), BAD)
async def test_a_wrong_wish_drains_nothing(
    tmp_path: Path, body: dict[str, Any], code: str, param: str
) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(DRAIN, json=body)
        assert answer.status_code == 400
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)
        assert (await service.client.get("/readyz")).status_code == 200
