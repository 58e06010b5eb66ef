"""Batches of a real engine by the official client: the answers that clients get, in spare rows."""

import asyncio
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.settings import ServerSettings, SettingsError
from server.storage.database import Store
from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer
from tests.server.scripted import running
from tests.server.storage.batch_clients import create, line, results, shown, text_of, until_ended

LINES = 30


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    flags = ("--data-dir", str(folder / "data"), "--min-free-bytes", "0")
    with RealServer(checkpoints("llama"), folder, *flags) as up:
        up.until_ready()
        yield up


def ask(client: openai.OpenAI, number: int, **fields: Any) -> Any:
    given = body(number) | fields
    return client.completions.create(
        **{name: given.pop(name) for name in list(given) if name != "ignore_eos"}, extra_body=given
    )


def body(number: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [3 + number, 7, 11 + number],
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }


def submit(client: openai.OpenAI, folder: Path, **fields: Any) -> Any:
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body(n) | fields}
        for n in range(LINES)
    ]
    lines[3]["body"]["max_tokens"] = -1
    path = folder / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with path.open("rb") as content:
        file = client.files.create(file=content, purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def until_batch_ended(client: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + 120
    while batch.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.engine
def test_lines_say_what_requests_say(
    server: RealServer, client: openai.OpenAI, tmp_path: Path
) -> None:
    batch = until_batch_ended(client, submit(client, tmp_path))
    assert (batch.status, batch.request_counts.completed) == ("completed", LINES - 1)
    good = {
        one["custom_id"]: one["response"]["body"]
        for one in map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    }
    for number in (0, 17, LINES - 1):
        online = ask(client, number)
        assert good[f"c{number}"]["choices"][0]["text"] == online.choices[0].text
    assert batch.usage.output_tokens == 20 * (LINES - 1)
    assert batch.usage.input_tokens == 3 * (LINES - 1)
    (bad,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert bad["custom_id"] == "c3"
    assert bad["response"]["body"]["error"]["param"] == "max_tokens"
    assert server.metric('rbln_background_rows_total{kind="alone"') > 0
    assert server.metric("rbln_recompiles_after_warmup_total") == 0
    assert next(one.id for one in client.batches.list(limit=1)) == batch.id
    assert {one.purpose for one in client.files.list()} == {"batch", "batch_output"}


@pytest.mark.engine
def test_streams_beside_a_batch_share_their_buckets(
    server: RealServer, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Three streams have the bucket of four: one row is to spare."""
    alone = [ask(client, n, max_tokens=200) for n in range(3)]
    deadline = time.monotonic() + 60
    # On a busy machine a batch may end before the streams have begun: then another one is sent.
    while server.metric('rbln_background_rows_total{kind="padding"') == 0:
        assert time.monotonic() < deadline
        before = server.metric('rbln_background_rows_total{kind="alone"')
        batch = submit(client, tmp_path, max_tokens=150)
        while server.metric('rbln_background_rows_total{kind="alone"') == before:
            time.sleep(0.01)
        streams = [ask(client, n, max_tokens=200, stream=True) for n in range(3)]
        texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
        assert texts == [answer.choices[0].text for answer in alone]
        assert until_batch_ended(client, batch).request_counts.completed == LINES - 1


# --------------------------------------------------------------------------------------- durability
ROOT = Path(__file__).parents[3]
KILLED_LINES = 2000


class Service:
    def __init__(self, folder: Path) -> None:
        self._port_file = folder / "port"
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.server.storage.service_script"]
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


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.wide)])
@pytest.mark.slow
async def test_kills_lose_no_line_and_double_none(tmp_path: Path, kills: int) -> None:
    chooser = random.Random(28)
    service = Service(tmp_path)
    async with await service.client() as client:
        batch = await create(client, [line(n) for n in range(KILLED_LINES)])
    done = []
    try:
        for _ in range(kills):
            async with await service.client() as client:
                await asyncio.sleep(chooser.uniform(0.0, 0.25))
                done.append((await shown(client, batch))["request_counts"]["completed"])
                # Beside another load it may not have answered a line yet.
                while done[-1] == 0:
                    await asyncio.sleep(0.01)
                    done[-1] = (await shown(client, batch))["request_counts"]["completed"]
            service.kill()
            service = Service(tmp_path)
        async with await service.client() as client:
            batch = await until_ended(client, await shown(client, batch))
            found = await results(client, batch["output_file_id"])
    finally:
        service.kill()
    assert done == sorted(done)
    assert done[0] < KILLED_LINES, "killed in the middle"
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {
        "total": KILLED_LINES,
        "completed": KILLED_LINES,
        "failed": 0,
    }
    assert set(found) == {f"c{n}" for n in range(KILLED_LINES)}


async def test_a_stop_puts_lines_back(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with running(tmp_path, data_dir=data, drain_timeout_s=0.2) as service:
        batch = await create(service.client, [line(n, "wait") for n in range(20)])
        await service.until("rbln_batch_lines_running", 8)
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


# ------------------------------------------------------------------------------------------- memory
LARGE_LINES = 50_000
ALLOWED_BYTES = 48 << 20
"""Far less than the file has: what its chunks, its ids and the database's cache may take."""


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.wide
async def test_fifty_thousand_lines_are_taken_in_bounded_memory(tmp_path: Path) -> None:
    content = tmp_path / "in.jsonl"
    with content.open("wb") as file:
        for number in range(LARGE_LINES):
            one = line(number, "wait")
            one["body"]["messages"][0]["content"] = f"{number} " + "word " * 400
            file.write(text_of([one]))
    assert content.stat().st_size > 2 * ALLOWED_BYTES
    service = Service(tmp_path)
    try:
        async with await service.client() as client:
            client.timeout = 300  # type: ignore[assignment]
            await client.get("/metrics")
            before = peak_bytes(service.process.pid)
            with content.open("rb") as file:
                form = {"file": ("in.jsonl", file), "purpose": (None, "batch")}
                uploaded = await client.post("/v1/files", files=form)
            assert uploaded.json()["bytes"] == content.stat().st_size
            wish = {"input_file_id": uploaded.json()["id"], "completion_window": "24h"}
            wish |= {"endpoint": "/v1/chat/completions"}
            batch = (await client.post("/v1/batches", json=wish)).json()
            async with asyncio.timeout(240):
                while batch["status"] == "validating":
                    await asyncio.sleep(0.1)
                    batch = await shown(client, batch)
            assert (batch["status"], batch["request_counts"]["total"]) == (
                "in_progress",
                LARGE_LINES,
            )
            assert peak_bytes(service.process.pid) - before < ALLOWED_BYTES
    finally:
        service.kill()
