"""Stored data belongs to an API key, wherever the key stands among the others."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from server.settings import ServerSettings
from server.storage.owners import owner_of_digest
from server.storage.schema import MIGRATIONS
from server.storage.store import Store
from tests.server.scripted import Running, running, said
from tests.server.storage.batches.clients import CHAT, line, text_of, until_ended, upload

FIRST, SECOND = "sk-first-unnamed-key", "sk-second-unnamed-key"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def leave_everything(service: Running, key: str) -> dict[str, str]:
    """Store one object of each kind; return their paths by kind."""
    headers, client = bearer(key), service.client
    file_id = await upload(client, text_of([line(1, "wait")]), **headers)
    wish = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = await client.post("/v1/batches", json=wish, headers=headers)
    params = {"model": "scripted", "max_tokens": 1, "messages": [], "do": "wait"}
    body = {"requests": [{"custom_id": "a", "params": params}]}
    messages = await client.post("/v1/messages/batches", json=body, headers=headers)
    response = await client.post("/v1/responses", json={"input": "x"}, headers=headers)
    body = {"input": "x", "user": "wait", "background": True}
    background = await client.post("/v1/responses", json=body, headers=headers)
    return {
        "file": f"/v1/files/{file_id}",
        "batch": f"/v1/batches/{batch.json()['id']}",
        "messages": f"/v1/messages/batches/{messages.json()['id']}",
        "response": f"/v1/responses/{response.json()['id']}",
        "background": f"/v1/responses/{background.json()['id']}",
    }


async def statuses(service: Running, paths: dict[str, str], key: str) -> set[int]:
    return {
        (await service.client.get(path, headers=bearer(key))).status_code for path in paths.values()
    }


def database_by_position(data: Path, owners: tuple[str, ...]) -> None:
    """Make a data folder of version 3, which has one file for each owner."""
    data.mkdir()
    with closing(sqlite3.connect(data / "store.sqlite")) as connection:
        connection.executescript("".join(MIGRATIONS[:3]) + "PRAGMA user_version = 3;")
        for number, owner in enumerate(owners):
            connection.execute(
                "INSERT INTO files VALUES (?, ?, 'batch', '', 2, 1, NULL)",
                (f"file-{number}", owner),
            )
        connection.commit()
    for number in range(len(owners)):
        (data / "files").mkdir(exist_ok=True)
        (data / "files" / f"file-{number}").write_text("{}")


async def seen(service: Running, key: str) -> set[str]:
    page = (await service.client.get("/v1/files", headers=bearer(key))).json()
    return {file["id"] for file in page["data"]}


async def test_data_of_positions_is_readable_by_no_key_until_it_is_adopted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    database_by_position(data, ("api-1", "api-2", "admin-1", "api-1x", "alice", "api-01"))
    named = ("api-1x=k3", "alice=k4", "api-01=k5")
    settings = {"data_dir": data, "api_key": (FIRST, SECOND, *named), "admin_key": ("root",)}
    async with running(tmp_path, **settings) as service:
        await said(caplog, "1 stored objects belong to no key")
        for key in (FIRST, SECOND, "root"):
            assert await seen(service, key) == set()
        # These are names.
        assert [await seen(service, key) for key in ("k3", "k4", "k5")] == [
            *({"file-3"}, {"file-4"}, {"file-5"}),
        ]
        own = await upload(service.client, b"{}", **bearer(FIRST))
    async with running(tmp_path, **settings, adopt_unnamed_key_data=True) as service:
        assert await seen(service, FIRST) == {"file-0", own}
        assert [await seen(service, key) for key in (SECOND, "root", "k3")] == [
            *({"file-1"}, {"file-2"}, {"file-3"}),
        ]


async def test_adopted_batches_keep_the_newer_idempotency_key(tmp_path: Path) -> None:
    data = tmp_path / "data"
    wish = {"endpoint": CHAT, "completion_window": "24h"}
    async with running(tmp_path, data_dir=data, api_key=(FIRST,)) as service:
        batches = []
        for _ in range(2):
            file_id = await upload(service.client, text_of([line(1)]), **bearer(FIRST))
            headers = bearer(FIRST) | {"idempotency-key": f"once-{len(batches)}"}
            body = wish | {"input_file_id": file_id}
            made = await service.client.post("/v1/batches", json=body, headers=headers)
            batches.append(made.json()["id"])
    with closing(sqlite3.connect(data / "store.sqlite")) as connection:
        connection.execute(
            "UPDATE batches SET owner = 'position:api-1', idempotency = 'once-1' WHERE id = ?",
            (batches[0],),
        )
        connection.commit()
    settings = {"data_dir": data, "api_key": (FIRST,), "adopt_unnamed_key_data": True}
    async with running(tmp_path, **settings) as service:
        page = (await service.client.get("/v1/batches", headers=bearer(FIRST))).json()
        assert {batch["id"] for batch in page["data"]} == set(batches)


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
        salts.append(store.owner_salt)
        store.close()
    again = Store(ServerSettings(data_dir=tmp_path / "one"))
    assert again.owner_salt == salts[0]
    again.close()
    digest = b"d" * 32
    owners = {owner_of_digest(salt, digest) for salt in salts}
    assert len(owners) == 2, "each folder has its own salt"
    assert all(digest.hex()[:8] not in owner for owner in owners)


LISTS = ("/v1/files", "/v1/batches", "/v1/messages/batches")


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
