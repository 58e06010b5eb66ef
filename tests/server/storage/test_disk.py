"""A disk that is full or fails: an error that says so, and everything else goes on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from server.errors import StorageFullError, StorageUnavailableError
from server.settings import ServerSettings
from server.storage import response_table as table
from server.storage.database import Reservation, Store, Work, disk_errors
from server.storage.files import FileStore
from server.storage.response_table import finished_response
from tests.server.scripted import running

FORM = {"file": ("f", b"x" * 100), "purpose": (None, "batch")}


class Upload:
    """A file of so many bytes."""

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
        answer = await client.post("/v1/files", files=FORM)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("storage_unavailable", "service_unavailable")
        assert str(tmp_path) not in error["message"]
        assert (await client.get("/v1/files")).json()["data"] == []
        assert (await client.post("/v1/chat/completions", json={"do": "x"})).is_success
        (data / "parts").unlink()
        (data / "elsewhere").rename(data / "parts")
        assert (await client.post("/v1/files", files=FORM)).status_code == 200


def test_a_write_without_room_is_a_full_disk() -> None:
    with (
        pytest.raises(StorageFullError),
        disk_errors(),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
