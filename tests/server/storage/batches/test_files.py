"""Files of clients over a real socket: kept whole, listed page by page, each key its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from server.storage.database import DataFolder
from tests.server.scripted import Running, running
from tests.server.storage.batches.clients import create, line, shown, text_of, until_ended, upload

FORM = "multipart/form-data; boundary=b"


async def test_a_file_comes_back_byte_for_byte(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000 + b"\r\n--not the boundary\r\n"
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        client = service.client
        file_id = await upload(client, content)
        file = (await client.get(f"/v1/files/{file_id}")).json()
        assert (file["object"], file["bytes"], file["filename"]) == (
            "file",
            len(content),
            "in.jsonl",
        )
        assert file["expires_at"] - file["created_at"] == 30 * 24 * 3600
        assert (await client.get(f"/v1/files/{file_id}/content")).content == content
        gone = await client.delete(f"/v1/files/{file_id}")
        assert gone.json() == {"id": file_id, "object": "file", "deleted": True}
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
            assert (await client.get(path)).status_code == 404
        assert list((tmp_path / "data" / "files").iterdir()) == []


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        client = service.client
        made = {await upload(client, b"{}") for _ in range(5)}
        for order in ("asc", "desc"):
            seen: list[str] = []
            query: dict[str, Any] = {"limit": 2, "order": order}
            while True:
                page = (await client.get("/v1/files", params=query)).json()
                seen += [file["id"] for file in page["data"]]
                assert page["last_id"] == seen[-1]
                if not page["has_more"]:
                    break
                query["after"] = page["last_id"]
            assert len(seen) == 5
            assert set(seen) == made
        assert (await client.get("/v1/files?purpose=batch_output")).json()["data"] == []
        for query, param in (
            ({"limit": 0}, "limit"),
            ({"limit": "1" * 4400}, "limit"),
            ({"limit": "²"}, "limit"),
            ({"order": "up"}, "order"),
        ):
            refused = (await client.get("/v1/files", params=query)).json()["error"]
            assert (refused["code"], refused["param"]) == ("invalid_value", param)
        refused = (await client.get("/v1/files?after=file-none")).json()["error"]
        assert (refused["code"], refused["param"]) == ("not_found", "after")


async def test_files_and_batches_of_other_keys_are_hidden(tmp_path: Path) -> None:
    keys = {"data_dir": tmp_path / "data", "api_key": ["one=1", "two=2"]}
    async with running(tmp_path, **keys) as service:
        client = service.client
        mine, other = {"authorization": "Bearer 1"}, {"authorization": "Bearer 2"}
        file_id = await upload(client, text_of([line(1)]), **mine)
        wish = {
            "input_file_id": file_id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        assert (await client.post("/v1/batches", json=wish, headers=other)).status_code == 404
        batch = (await client.post("/v1/batches", json=wish, headers=mine)).json()
        for path in (f"/v1/files/{file_id}", f"/v1/batches/{batch['id']}"):
            assert (await client.get(path, headers=mine)).status_code == 200
            assert (await client.get(path, headers=other)).status_code == 404
        assert (await client.delete(f"/v1/files/{file_id}", headers=other)).status_code == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await client.get(path, headers=other)).json()["data"] == []
            assert (await client.get(path)).status_code == 401
        while (await client.get(f"/v1/batches/{batch['id']}", headers=mine)).json()[
            "status"
        ] != "completed":
            await asyncio.sleep(0.02)
        # The line counts for the key that left it here.
        page = (await client.get("/metrics", headers=mine)).text
        assert 'rbln_key_requests_total{key="one",outcome="ok"}' in page


def form(*parts: tuple[str, str]) -> bytes:
    body = b""
    for head, content in parts:
        body += f"--b\r\ncontent-disposition: form-data; {head}\r\n\r\n{content}\r\n".encode()
    return body + b"--b--\r\n"


FILE = ('name="file"; filename="f"', "{}")
PURPOSE = ('name="purpose"', "batch")
ANCHOR = ('name="expires_after[anchor]"', "created_at")
SECONDS = 'name="expires_after[seconds]"'


async def test_files_expire(tmp_path: Path) -> None:
    later = (
        ('name="expires_after[seconds]"', "3600"),
        ('name="expires_after[anchor]"', "created_at"),
    )
    async with running(tmp_path, data_dir=tmp_path / "data", file_retention_s=1) as service:
        short = await upload(service.client, b"{}")
        kept = await service.client.post(
            "/v1/files", content=form(FILE, PURPOSE, *later), headers={"content-type": FORM}
        )
        file = kept.json()
        assert file["expires_at"] == file["created_at"] + 3600
        await asyncio.sleep(1.1)
    async with running(tmp_path, data_dir=tmp_path / "data", file_retention_s=1) as service:
        while (await service.client.get(f"/v1/files/{short}")).status_code == 200:
            await asyncio.sleep(0.02)
        assert (await service.client.get(f"/v1/files/{file['id']}")).status_code == 200


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_stored_bytes": 1024}, "--max-stored-bytes"),
        ({"max_files_per_key": 1}, "at most 1 are allowed"),
        ({"min_free_bytes": 1 << 60}, "--min-free-bytes"),
    ],
)
async def test_quotas(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data", **settings) as service:
        files = {"file": ("f", b"x" * 900), "purpose": (None, "batch")}
        answers = [await service.client.post("/v1/files", files=files) for _ in range(2)]
        assert answers[1].status_code == 507
        error = answers[1].json()["error"]
        assert error["code"] == "storage_full"
        assert words in error["message"]
        assert (await service.client.post("/v1/chat/completions", json={"do": "x"})).is_success


async def test_answers_wait_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.storage.batches._PAUSE_S", 0.1)
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await create(service.client, [line(n, "wait") for n in range(12)])
        while await service.metric("rbln_batch_lines_running") < 8:
            await asyncio.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(DataFolder, "free_bytes", lambda _self: 0)
            service.frontend.go_on.set()
            while not await service.metric("rbln_storage_full"):
                await asyncio.sleep(0.01)
            assert (await shown(service.client, batch))["request_counts"]["completed"] == 0
            assert await online(service)
        batch = await until_ended(service.client, batch)
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}


async def online(service: Running) -> bool:
    answer = await service.client.post("/v1/chat/completions", json={"do": "answer"})
    return json.loads(answer.content) == {"ok": True}


async def test_without_a_folder_it_says_how(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        for method, path in (
            *(("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/files/x/content")),
            *(("GET", "/v1/batches"), ("POST", "/v1/batches"), ("POST", "/v1/batches/x/cancel")),
        ):
            answer = await service.client.request(method, path, json={})
            assert answer.status_code == 501
            assert answer.json()["error"]["code"] == "not_enabled"
            assert "--data-dir" in answer.json()["error"]["message"]
