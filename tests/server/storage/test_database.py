"""Quotas hold however many requests store at once."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import bounds
from server.errors import StorageFullError, StorageUnavailableError
from server.settings import ServerSettings
from server.storage import response_table as table
from server.storage.database import (
    BATCHES,
    RESPONSES,
    TABLES,
    ExpiryClock,
    JobTable,
    Reservation,
    Store,
    Work,
    disk_errors,
    get_usage,
    owner_of_digest,
    stored_bytes,
)
from server.storage.files import FileStore
from server.storage.jobs import JobLoop
from server.storage.response_table import finished_response
from tests.server.scripted import Running, running
from tests.server.storage.batch_clients import (
    CHAT,
    bearer,
    create,
    line,
    shown,
    text_of,
    until_ended,
    upload,
)

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
            await service.until("rbln_storage_full")
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
    assert await run(partial(get_usage, kind="files")) == (3, 30)
    assert await run(partial(get_usage, kind="responses")) == (3, 12)
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
        ("a", "files", 1, 10),
        ("b", "files", 1, 10),
        ("a", "responses", 2, 8),
        ("b", "responses", 1, 9),
    ]
    store.close()


# ------------------------------------------------------------------------------------------- owners
FIRST, SECOND = "sk-first-unnamed-key", "sk-second-unnamed-key"


async def leave_everything(service: Running, key: str) -> dict[str, str]:
    """Store one object of each kind; return their paths by kind."""
    headers, client = bearer(key), service.client
    file_id = await upload(client, text_of([line(1, "wait")]), **headers)
    wish = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = await client.post("/v1/batches", json=wish, headers=headers)
    response = await client.post("/v1/responses", json={"input": "x"}, headers=headers)
    body = {"input": "x", "user": "wait", "background": True}
    background = await client.post("/v1/responses", json=body, headers=headers)
    return {
        "file": f"/v1/files/{file_id}",
        "batch": f"/v1/batches/{batch.json()['id']}",
        "response": f"/v1/responses/{response.json()['id']}",
        "background": f"/v1/responses/{background.json()['id']}",
    }


async def statuses(service: Running, paths: dict[str, str], key: str) -> set[int]:
    return {
        (await service.client.get(path, headers=bearer(key))).status_code for path in paths.values()
    }


async def seen(service: Running, key: str) -> set[str]:
    page = (await service.client.get("/v1/files", headers=bearer(key))).json()
    return {file["id"] for file in page["data"]}


async def test_the_name_of_a_position_is_no_owner(tmp_path: Path) -> None:
    keys = {"data_dir": tmp_path / "data", "api_key": (FIRST, "api-1=named")}
    async with running(tmp_path, **keys) as service:
        own = await upload(service.client, b"{}", **bearer(FIRST))
        assert await seen(service, "named") == set()
        assert await seen(service, FIRST) == {own}


async def test_lines_of_an_unnamed_key_count_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data", api_key=(FIRST,)) as service:
        service.client.headers.update(bearer(FIRST))
        file_id = await upload(service.client, text_of([line(1)]))
        wish = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await service.client.post("/v1/batches", json=wish)).json()
        before = await service.metric('rbln_key_requests_total{key="api-1",outcome="ok"}')
        await until_ended(service.client, batch)
        page = (await service.client.get("/metrics")).text
        assert await service.metric('rbln_key_requests_total{key="api-1",outcome="ok"}') > before
        assert "key:" not in page


def test_a_stored_owner_does_not_reveal_its_key(tmp_path: Path) -> None:
    salts = []
    for name in ("one", "two"):
        store = Store(ServerSettings(data_dir=tmp_path / name))
        salts.append(store.database.owner_salt)
        store.close()
    again = Store(ServerSettings(data_dir=tmp_path / "one"))
    assert again.database.owner_salt == salts[0]
    again.close()
    digest = b"d" * 32
    owners = {owner_of_digest(salt, digest) for salt in salts}
    assert len(owners) == 2, "each folder has its own salt"
    assert all(digest.hex()[:8] not in owner for owner in owners)


LISTS = ("/v1/files", "/v1/batches")


async def test_an_unnamed_key_keeps_its_data_at_any_position(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running(tmp_path, data_dir=data, api_key=(FIRST, SECOND)) as service:
        paths = await leave_everything(service, FIRST)
        assert await statuses(service, paths, FIRST) == {200}
        assert await statuses(service, paths, SECOND) == {404}
    # SECOND stands where FIRST stood.
    async with running(tmp_path, data_dir=data, api_key=(SECOND,)) as service:
        assert await statuses(service, paths, SECOND) == {404}
        for path in LISTS:
            answer = await service.client.get(path, headers=bearer(SECOND))
            assert answer.json()["data"] == []
    async with running(tmp_path, data_dir=data, api_key=("new", SECOND, FIRST)) as service:
        assert await statuses(service, paths, FIRST) == {200}
        assert await statuses(service, paths, SECOND) == {404}


# --------------------------------------------------------------------------------------------- disk
UPLOAD = {"file": ("f", b"x" * 100), "purpose": (None, "batch")}


class Upload:
    name = "f"

    def __init__(self, size: int) -> None:
        self.fields: dict[str, str] = {}
        self._size = size

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b"x" * self._size


def pragma(text: str) -> Work[None]:
    def change(db: sqlite3.Connection) -> None:
        db.execute(f"PRAGMA {text}")

    return change


def keep(store: Store, name: str, size: int) -> Work[None]:
    answer = {"id": name, "status": "completed", "output": [], "text": "x" * size}
    place = Reservation(store.quotas, "", "responses")
    response = finished_response("", None, b"[]", json.dumps(answer).encode(), 0)
    return partial(table.insert, response=response, reservation=place)


async def test_a_full_database_is_a_full_disk(tmp_path: Path) -> None:
    store = Store(ServerSettings(data_dir=tmp_path))
    await store.database.run(pragma("max_page_count = 100"))
    with pytest.raises(StorageFullError):
        await store.database.run(keep(store, "large", 1_000_000))
    await store.database.run(pragma("max_page_count = 1000000"))
    await store.database.run(keep(store, "large", 1_000_000))
    store.close()


async def test_a_database_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    store = Store(ServerSettings(data_dir=tmp_path))
    await store.database.run(keep(store, "one", 10))
    await store.database.run(pragma("query_only = ON"))
    with pytest.raises(StorageUnavailableError, match="readonly database"):
        await store.database.run(keep(store, "two", 10))
    files = FileStore(store, 1 << 20, 0)
    with pytest.raises(StorageUnavailableError):
        await files.create("", Upload(100), lambda _: ("batch", None))
    # No content is left without a row, and no place is taken.
    assert [*store.folder.files.iterdir(), *store.folder.parts.iterdir()] == []
    found = await store.database.read(partial(table.get, owner="", response_id="one"))
    assert found.status == "completed"
    await store.database.run(pragma("query_only = OFF"))
    await files.create("", Upload(100), lambda _: ("batch", None))
    store.close()


async def test_faults_of_ours_stay_faults(tmp_path: Path) -> None:
    store = Store(ServerSettings(data_dir=tmp_path))
    await store.database.run(keep(store, "one", 10))
    with pytest.raises(sqlite3.IntegrityError):
        await store.database.run(keep(store, "one", 10))
    store.close()


async def test_a_folder_that_fails_is_503_until_it_works(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running(tmp_path, data_dir=data) as service:
        client = service.client
        (data / "parts").rename(data / "elsewhere")
        (data / "parts").write_text("no folder")
        answer = await client.post("/v1/files", files=UPLOAD)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("storage_unavailable", "service_unavailable")
        assert str(tmp_path) not in error["message"]
        assert (await client.get("/v1/files")).json()["data"] == []
        assert (await client.post("/v1/chat/completions", json={"do": "x"})).is_success
        (data / "parts").unlink()
        (data / "elsewhere").rename(data / "parts")
        assert (await client.post("/v1/files", files=UPLOAD)).status_code == 200


def test_a_write_without_room_is_a_full_disk() -> None:
    with (
        pytest.raises(StorageFullError),
        disk_errors(),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")


# -------------------------------------------------------------------------------------------- clock
HOUR, DAY = 3600.0, 86400.0


@dataclass
class Clocks:
    """A host's two clocks, and the one under test."""

    system: float = 1_000_000.0
    passed: float = 50.0

    def __post_init__(self) -> None:
        self.clock = ExpiryClock(lambda: self.system, lambda: self.passed)

    def after(self, seconds: float, jump: float = 0.0) -> float:
        """Return how far the clock under test has gone since its start."""
        self.passed += seconds
        self.system += seconds + jump
        return self.clock.now() - 1_000_000.0


def test_time_that_passes_counts() -> None:
    clocks = Clocks()
    assert clocks.after(5) == 5
    assert clocks.after(3 * DAY) == 3 * DAY + 5


def test_a_jump_forward_that_is_taken_back_expires_nothing() -> None:
    clocks = Clocks()
    assert clocks.after(10, jump=2 * DAY) == 10
    assert clocks.after(HOUR / 2) == HOUR / 2 + 10
    assert clocks.after(10, jump=-2 * DAY) == HOUR / 2 + 20
    # The next jump has an hour of its own.
    assert clocks.after(HOUR, jump=DAY) == 1.5 * HOUR + 20


def test_a_jump_forward_that_stays_is_followed() -> None:
    clocks = Clocks()
    assert clocks.after(10, jump=2 * DAY) == 10
    assert clocks.after(HOUR) == HOUR + 10 + 2 * DAY


def test_a_jump_backward_is_followed_at_once() -> None:
    clocks = Clocks()
    assert clocks.after(10, jump=-DAY) == 10 - DAY
    assert clocks.after(5) == 15 - DAY


def test_small_corrections_are_no_jumps() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.after(HOUR, jump=1)
    assert clocks.clock.now() == clocks.system


# --------------------------------------------------------------------------------------------- jobs
@pytest.mark.parametrize("table", [BATCHES, RESPONSES])
def test_open_rows_have_a_partial_index(table: JobTable) -> None:
    text = " ".join(TABLES.split())
    assert (
        f"ON {table.name} (" in text.split(f"WHERE {table.is_open};")[0].split("CREATE INDEX")[-1]
    )


async def test_a_failed_turn_is_logged_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = asyncio.Queue[int]()

    async def turn() -> None:
        await asyncio.sleep(0)
        turns.put_nowait(0)
        loop.wake()
        if turns.qsize() == 1:
            raise RuntimeError("broken")

    loop = JobLoop("work", turn)
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(10):
        while turns.qsize() < 2:
            await asyncio.sleep(0)
    task.cancel()
    assert "work: a turn failed" in caplog.text
