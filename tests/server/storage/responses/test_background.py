"""Responses in the background: bounded, in fair turns, and on the disk while they wait."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from server.storage.response_table import Waiting
from server.storage.responses import FairQueue
from tests.server.scripted import Running, ScriptedLauncher, running
from tests.server.storage.responses.test_stored_responses import PATH, create, shown, text, until

KEYS = ("a=k1", "b=k2")
ROWS = 8
"""Of the scripted engine."""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def ask(service: Running, key: str = "k1", **fields: Any) -> httpx.Response:
    body = {"input": "x", "user": "wait", "background": True, **fields}
    return await service.client.post(PATH, json=body, headers=bearer(key))


async def test_they_are_bounded_for_each_key_and_in_all(tmp_path: Path) -> None:
    limits = {"max_background_per_key": 3, "max_background": 4}
    async with running(tmp_path, data_dir=tmp_path / "data", api_key=KEYS, **limits) as service:
        answers = await asyncio.gather(*(ask(service) for _ in range(9)))
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 6}
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("overloaded", "background")
        assert "3 responses of this key" in error["message"]
        assert "at most 3 are allowed" in error["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert (await ask(service, "k2")).status_code == 200
        full = (await ask(service, "k2")).json()["error"]["message"]
        assert "at most 4 are allowed" in full
        name = next(a.json()["id"] for a in answers if a.status_code == 200)
        await service.client.post(f"{PATH}/{name}/cancel", headers=bearer("k1"))
        assert (await ask(service)).status_code == 200
        counted = 'rbln_admission_rejections_total{reason="background"}'
        service.client.headers.update(bearer("k1"))
        assert await service.metric(counted) == 7


async def test_owners_take_turns(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data", api_key=KEYS) as service:
        many = [(await ask(service)).json()["id"] for _ in range(ROWS + 4)]
        one = (await ask(service, "k2")).json()["id"]
        # One ends; the next turn is that of the other key, which came last.
        await service.client.post(f"{PATH}/{many[0]}/cancel", headers=bearer("k1"))
        service.client.headers.update(bearer("k2"))
        await until(service.client, one, "in_progress")
        service.client.headers.update(bearer("k1"))
        waiting = [await shown(service.client, name) for name in many[ROWS:]]
        assert {response["status"] for response in waiting} == {"queued"}


def test_the_next_turn_is_that_of_whoever_runs_least() -> None:
    queue = FairQueue()
    for owner in ("a", "a", "a", "b", "b", "c"):
        queue.add(Waiting(f"{owner}{len(queue)}", owner))
    running_now = Counter({"a": 1})
    order = []
    while (turn := queue.take(running_now)) is not None:
        running_now[turn.owner] += 1
        order.append(turn.id)
    assert order == ["b3", "c5", "a0", "b4", "a1", "a2"]
    assert len(queue) == 0


async def test_they_wait_on_the_disk_and_are_followed_there(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    launcher.launched.set()
    async with running(tmp_path, launcher, data_dir=tmp_path / "data") as service:
        for _ in range(ROWS):
            await create(service.client, user="wait", background=True)
        last = await create(service.client, "x" * 50_000, background=True)
        body = {"input": "x", "background": True, "stream": True}
        async with service.client.stream("POST", PATH, json=body) as stream:
            frames = stream.aiter_lines()
            while not service.frontend.headers:
                await asyncio.sleep(0.01)
            assert await until_queued(service, 2)
            service.frontend.go_on.set()
            lines = [line async for line in frames if line.startswith("event: ")]
        assert lines[-1] == "event: response.completed"
        assert text(await until(service.client, last["id"], "completed")) == "1 items"


async def until_queued(service: Running, number: int) -> bool:
    async with asyncio.timeout(10):
        while await service.metric('rbln_stored_responses{status="queued"}') != number:
            await asyncio.sleep(0.05)
    return True


async def test_a_stream_that_waits_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        for _ in range(ROWS):
            await create(service.client, user="wait", background=True)
        body = {"input": "x", "background": True, "stream": True}
        sending = asyncio.ensure_future(service.client.post(PATH, json=body))
        assert await until_queued(service, 1)
        page = await service.client.get("/metrics")
        assert page.is_success
        name = await queued_name(tmp_path / "data")
        await service.client.post(f"{PATH}/{name}/cancel")
        assert (await asyncio.wait_for(sending, 10)).status_code == 200
        assert (await shown(service.client, name))["status"] == "cancelled"


async def queued_name(data: Path) -> str:
    with closing(sqlite3.connect(data / "store.sqlite")) as connection:
        row = connection.execute("SELECT id FROM responses WHERE status = 'queued'").fetchone()
        return str(row[0])
