"""Quotas hold however many requests store at once."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import bounds
from server.errors import StorageFullError
from server.settings import ServerSettings
from server.storage.database import Reservation, Store, Work, stored_bytes, usage_of
from tests.server.scripted import Running, running
from tests.server.storage.batches.clients import create, line, shown, text_of, until_ended

HEAD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n'
)
FORM = {"content-type": "multipart/form-data; boundary=b"}
FILES = "/v1/files"


async def slow_form(size: int, gate: asyncio.Event) -> AsyncIterator[bytes]:
    """A form whose second half comes once `gate` is set."""
    yield HEAD + b"x" * (size // 2)
    await gate.wait()
    yield b"x" * (size - size // 2) + b"\r\n--b--\r\n"


async def at_once(service: Running, number: int, size: int) -> list[httpx.Response]:
    """Upload so many files, all of which have begun before the first ends."""
    gate = asyncio.Event()
    sending = [
        asyncio.ensure_future(
            service.client.post(FILES, content=slow_form(size, gate), headers=FORM)
        )
        for _ in range(number)
    ]
    await asyncio.sleep(0.5)
    gate.set()
    return await asyncio.gather(*sending)


def codes(answers: list[httpx.Response]) -> Counter[int]:
    return Counter(answer.status_code for answer in answers)


async def test_files_uploaded_at_once_are_no_more_than_the_quota(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "max_files_per_key": 3}
    async with running(tmp_path, **settings) as service:
        answers = await at_once(service, 10, 100)
        assert codes(answers) == {200: 3, 507: 7}
        refused = next(answer for answer in answers if answer.status_code == 507)
        assert "at most 3 are allowed" in refused.json()["error"]["message"]
        listed = (await service.client.get(FILES)).json()["data"]
        assert len(listed) == 3
        # Places that were given up are free again.
        await service.client.delete(f"{FILES}/{listed[0]['id']}")
        broken = await service.client.post(FILES, content=HEAD, headers=FORM)
        assert broken.status_code == 400
        assert codes(await at_once(service, 2, 100)) == {200: 1, 507: 1}


async def test_bytes_uploaded_at_once_are_no_more_than_the_quota(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "max_stored_bytes": 60_000}
    async with running(tmp_path, **settings) as service:
        found = codes(await at_once(service, 10, 20_000))
        assert found[200] <= 3
        assert found[200] + found[507] == 10
        listed = (await service.client.get(FILES)).json()["data"]
        assert sum(file["bytes"] for file in listed) <= 60_000
        # What was refused left nothing behind, and holds no room.
        while len(listed) < 3:
            answers = await at_once(service, 1, 20_000)
            assert codes(answers) == {200: 1}
            listed = (await service.client.get(FILES)).json()["data"]
        assert codes(await at_once(service, 1, 1)) == {507: 1}


async def test_responses_made_at_once_are_no_more_than_the_quota(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "max_responses_per_key": 3}
    async with running(tmp_path, **settings) as service:
        body = {"input": "x", "user": "wait", "store": True}
        sending = [
            asyncio.ensure_future(service.client.post("/v1/responses", json=body))
            for _ in range(10)
        ]
        while sum(one.done() for one in sending) < 7:
            await asyncio.sleep(0.02)
        service.frontend.go_on.set()
        answers = await asyncio.gather(*sending)
        assert codes(answers) == {200: 3, 507: 7}
        assert await until_stored(service, 3) == 3


async def until_stored(service: Running, number: int) -> float:
    async with asyncio.timeout(10):
        while (
            found := await service.metric('rbln_stored_responses{status="completed"}')
        ) != number:
            await asyncio.sleep(0.05)
    return found


async def test_a_place_is_free_again_when_its_client_leaves(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "max_files_per_key": 1, "max_responses_per_key": 1}
    async with running(tmp_path, **settings) as service:
        gate = asyncio.Event()
        upload = service.client.post(FILES, content=slow_form(100, gate), headers=FORM)
        body = {"input": "x", "user": "wait", "store": True}
        response = service.client.post("/v1/responses", json=body)
        leaving = [asyncio.ensure_future(one) for one in (upload, response)]
        await asyncio.sleep(0.3)
        assert codes(await at_once(service, 1, 10)) == {507: 1}
        for task in leaving:
            task.cancel()
        for path, body in ((FILES, None), ("/v1/responses", {"input": "x", "store": True})):
            async with asyncio.timeout(10):
                while await stored(service, path, body) == 507:
                    await asyncio.sleep(0.05)


async def stored(service: Running, path: str, body: Any) -> int:
    if body is None:
        return (await at_once(service, 1, 10))[0].status_code
    return (await service.client.post(path, json=body)).status_code


async def test_lines_wait_while_nothing_more_may_be_stored(tmp_path: Path) -> None:
    lines = [line(number) for number in range(3)]
    size = len(text_of(lines))
    settings = {"data_dir": tmp_path / "data", "max_stored_bytes": size + 1000}
    async with running(tmp_path, **settings) as service:
        filling = (await at_once(service, 1, 1000))[0].json()["id"]
        batch = await create(service.client, lines)
        async with asyncio.timeout(10):
            while not await service.metric("rbln_storage_full"):
                await asyncio.sleep(0.05)
        assert (await shown(service.client, batch))["request_counts"]["completed"] == 0
        await service.client.delete(f"{FILES}/{filling}")
        batch = await until_ended(service.client, batch)
        assert batch["request_counts"]["completed"] == 3


async def test_a_reservation_that_ended_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "MAX_FILES_PER_KEY", 1)
    store = Store(ServerSettings(data_dir=tmp_path, max_stored_bytes=1024))
    reserve, settle = store.quotas.reserve, store.quotas.settle

    def place() -> Reservation:
        return Reservation(store.quotas, "me", "files")

    early = place()
    early.release()
    # As when a client leaves before its transaction begins.
    await store.database.run(partial(reserve, reservation=early, size=1000))
    first, second = place(), place()
    await store.database.run(partial(reserve, reservation=first, size=1000))
    with pytest.raises(StorageFullError):
        await store.database.run(partial(reserve, reservation=second))
    first.release()
    first.release()
    await store.database.run(partial(reserve, reservation=second))
    with pytest.raises(StorageFullError, match="at most 1 are allowed"):
        await store.database.run(partial(settle, reservation=first, size=1))
    with pytest.raises(StorageFullError, match="max-stored-bytes"):
        await store.database.run(partial(settle, reservation=second, size=1025))
    store.close()


async def test_a_slow_disk_delays_no_release(tmp_path: Path) -> None:
    """`release` runs on the event loop, where it must not wait for a transaction's queries."""
    store = Store(ServerSettings(data_dir=tmp_path))
    quotas = store.quotas
    held, slow = Reservation(quotas, "me", "files"), Reservation(quotas, "me", "files")
    await store.database.run(quotas.reserve, held, 10)
    reading, go_on = threading.Event(), threading.Event()

    def wait(_: str) -> None:
        reading.set()
        go_on.wait(10)

    for work in (
        partial(quotas.reserve, reservation=slow, size=1),
        quotas.has_room,
        partial(quotas.extend, reservation=slow, least=1, most=2),
        partial(quotas.settle, reservation=slow, size=1),
    ):
        reading.clear()
        go_on.clear()

        def on_a_slow_disk(db: sqlite3.Connection, work: Work[object] = work) -> None:
            db.set_trace_callback(wait)
            try:
                work(db)
            finally:
                db.set_trace_callback(None)

        writing = asyncio.ensure_future(store.database.run(on_a_slow_disk))
        assert await asyncio.to_thread(reading.wait, 10)
        started = time.monotonic()
        held.release()
        took_s = time.monotonic() - started
        go_on.set()
        await writing
        assert took_s < 5
    store.close()


async def test_usage_follows_every_change(tmp_path: Path) -> None:
    store = Store(ServerSettings(data_dir=tmp_path))
    run = store.database.run

    def add(db: sqlite3.Connection) -> None:
        for number, owner in enumerate(("a", "a", "b")):
            db.execute(
                "INSERT INTO files VALUES (?, ?, 'batch', '', 10, 1, NULL)", (str(number), owner)
            )
            db.execute(
                "INSERT INTO responses VALUES (?, ?, NULL, 'completed', 1, NULL, 1, 1, 'default', "
                "0, NULL, '[]', '{}', 4, '[]')",
                (str(number), owner),
            )

    await run(add)
    assert await run(partial(usage_of, kind="files")) == (3, 30)
    assert await run(partial(usage_of, kind="responses")) == (3, 12)
    assert await run(stored_bytes) == 42
    for change in (
        "DELETE FROM files WHERE id = '0'",
        "UPDATE responses SET bytes = bytes + 5 WHERE id = '2'",
    ):
        await run(lambda db, change=change: db.execute(change).rowcount)
    found = await run(
        lambda db: db.execute("SELECT * FROM usage WHERE objects ORDER BY kind, owner").fetchall()
    )
    assert [tuple(row) for row in found] == [
        *(("a", "files", 1, 10), ("b", "files", 1, 10)),
        *(("a", "responses", 2, 8), ("b", "responses", 1, 9)),
    ]
    store.close()
