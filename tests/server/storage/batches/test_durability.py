"""Stored data survives every end of a process, and one process at a time has it."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from server.settings import ServerSettings, SettingsError
from server.storage.database import Store
from tests.server.scripted import running
from tests.server.storage.batches.clients import create, line, results, shown, until_ended

ROOT = Path(__file__).parents[4]
LINES = 2000


class Service:
    """A process that can be killed."""

    def __init__(self, folder: Path) -> None:
        self._port_file = folder / "port"
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.server.storage.batches.service_script"]
        self.process = subprocess.Popen(
            [*command, str(folder / "data"), str(self._port_file)], cwd=ROOT
        )

    async def client(self) -> httpx.AsyncClient:
        while not self._port_file.exists() or not self._port_file.read_text():
            assert self.process.poll() is None
            await asyncio.sleep(0.02)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port_file.read_text()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.wide)])
async def test_kills_lose_no_line_and_double_none(tmp_path: Path, kills: int) -> None:
    chooser = random.Random(28)
    service = Service(tmp_path)
    async with await service.client() as client:
        batch = await create(client, [line(n) for n in range(LINES)])
    done = []
    try:
        for _ in range(kills):
            async with await service.client() as client:
                await asyncio.sleep(chooser.uniform(0.0, 0.25))
                done.append((await shown(client, batch))["request_counts"]["completed"])
            service.kill()
            service = Service(tmp_path)
        async with await service.client() as client:
            batch = await until_ended(client, await shown(client, batch))
            found = await results(client, batch["output_file_id"])
    finally:
        service.kill()
    assert done == sorted(done)
    assert done[-1] > 0, "killed in the middle"
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert set(found) == {f"c{n}" for n in range(LINES)}


async def test_a_stop_puts_lines_back(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running(tmp_path, data_dir=data, drain_timeout_s=0.2) as service:
        batch = await create(service.client, [line(n, "wait") for n in range(20)])
        while await service.metric("rbln_batch_lines_running") < 8:
            await asyncio.sleep(0.01)
        service.signal()
        assert await service.exit_code == 0
    async with running(tmp_path, data_dir=data) as service:
        service.frontend.go_on.set()
        batch = await until_ended(service.client, await shown(service.client, batch))
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


def opened(data: Path) -> Store:
    return Store(ServerSettings(data_dir=data))


async def test_a_folder_has_one_server(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data"):
        with pytest.raises(SettingsError, match="in use by another server"):
            opened(tmp_path / "data")


def test_an_unusable_folder_is_reported(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    with pytest.raises(SettingsError, match="cannot be written"):
        opened(place / "data")


@pytest.mark.parametrize("damage", ["garbage", "earlier", "later"])
async def test_a_damaged_database_is_reported(tmp_path: Path, damage: str) -> None:
    data = tmp_path / "data"
    async with running(tmp_path, data_dir=data) as service:
        await create(service.client, [line(1)])
    if damage == "garbage":
        (data / "store.sqlite").write_bytes(b"garbage" * 1000)
        (data / "store.sqlite-wal").unlink(missing_ok=True)
    else:
        with sqlite3.connect(data / "store.sqlite") as connection:
            connection.execute(f"PRAGMA user_version = {8 if damage == 'earlier' else 99}")
    with pytest.raises(SettingsError, match=r"store\.sqlite cannot be used"):
        opened(data)


async def test_what_no_name_leads_to_goes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running(tmp_path, data_dir=data) as service:
        batch = await until_ended(service.client, await create(service.client, [line(1)]))
    for folder in ("files", "parts"):
        (data / folder / "left-by-a-crash").write_text("x")
    async with running(tmp_path, data_dir=data) as service:
        # Before the first request: what an upload has begun has no name, either.
        for folder in ("files", "parts"):
            assert not (data / folder / "left-by-a-crash").exists()
        assert set(await results(service.client, batch["output_file_id"])) == {"c1"}
