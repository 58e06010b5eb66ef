"""Stored data belongs to an API key, wherever the key stands among the others."""

from __future__ import annotations

from pathlib import Path

from server.settings import ServerSettings
from server.storage.database import Store, owner_of_digest
from tests.server.scripted import Running, running
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
