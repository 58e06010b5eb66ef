"""Stored responses survive every end of a process, and have owners, quotas and an expiry."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.errors import NotFoundError
from server.settings import ServerSettings
from server.storage import response_table as table
from server.storage.database import RESPONSES, Reservation, Store, Work
from server.storage.response_table import finished_response
from tests.server.scripted import Running, running
from tests.server.storage.batches.test_durability import Service

PATH = "/v1/responses"


async def create(client: httpx.AsyncClient, given: Any = "hi", **fields: Any) -> Any:
    headers = fields.pop("headers", {})
    answer = await client.post(PATH, json={"input": given, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def shown(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"{PATH}/{name}")).json()
    return found


async def until(client: httpx.AsyncClient, name: str, *statuses: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (response := await shown(client, name))["status"] not in statuses:
            await asyncio.sleep(0.02)
    return response


def text(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


async def frames(client: httpx.AsyncClient, name: str, **query: Any) -> list[str]:
    answer = await client.get(f"{PATH}/{name}", params={"stream": "true", **query})
    assert answer.status_code == 200, answer.text
    return [part for part in answer.text.split("\n\n") if part]


async def until_stored(data: Path, name: str, events: int) -> None:
    """Wait until so many events are on the disk."""
    query = "SELECT count(*) FROM response_events WHERE response = ?"
    with closing(sqlite3.connect(data / "store.sqlite")) as connection:
        async with asyncio.timeout(20):
            while connection.execute(query, (name,)).fetchone()[0] < events:
                await asyncio.sleep(0.05)


async def test_it_outlives_a_kill(tmp_path: Path) -> None:
    service = Service(tmp_path)
    async with await service.client() as client:
        first = await create(client)
        polled = await create(client, user="wait", background=True)
        await until(client, polled["id"], "in_progress")
        streamed = ""
        wish = {"input": "x", "user": "wait", "background": True, "stream": True}
        async with client.stream("POST", PATH, json=wish) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: ") and "delta" in line:
                    break
                if '"id":"' in line:
                    streamed = line.split('"id":"')[1].split('"')[0]
        await until_stored(tmp_path / "data", streamed, events=3)
        service.kill()
    async with running(tmp_path, data_dir=tmp_path / "data") as again:
        client = again.client
        assert text(await shown(client, first["id"])) == "1 items"
        second = await create(client, previous_response_id=first["id"])
        assert text(second) == "3 items"
        # What was polled is made again; one with stored events is not.
        await until(client, polled["id"], "in_progress")
        again.frontend.go_on.set()
        assert text(await until(client, polled["id"], "completed")) == "1 items"
        failed = await shown(client, streamed)
        assert failed["status"] == "failed"
        assert "while this response was streamed" in failed["error"]["message"]
        assert len(await frames(client, streamed)) == 3


async def test_what_ends_the_server_each_time_is_given_up(tmp_path: Path) -> None:
    for turn in range(3):
        async with running(tmp_path, data_dir=tmp_path / "data", drain_timeout_s=0.1) as service:
            if not turn:
                name = (await create(service.client, user="wait", background=True))["id"]
            while not service.frontend.headers:
                await asyncio.sleep(0.01)
            service.signal()
            assert await service.exit_code == 0
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        response = await until(service.client, name, "failed")
        assert "ended 3 times" in response["error"]["message"]


async def test_other_keys_see_nothing_of_it(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "api_key": ("a=k1", "b=k2")}
    async with running(tmp_path, **settings) as service:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        name = (await create(service.client, headers=mine))["id"]
        for method, path in (
            *(("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")),
        ):
            answer = await service.client.request(method, f"{PATH}/{name}{path}", headers=other)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        body = {"input": "x", "previous_response_id": name}
        refused = await service.client.post(PATH, json=body, headers=other)
        assert refused.json()["error"]["param"] == "previous_response_id"
        assert (await service.client.get(f"{PATH}/{name}", headers=mine)).status_code == 200


async def test_above_the_quota_only_demanded_storage_fails(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "max_responses_per_key": 2}
    async with running(tmp_path, **settings) as service:
        kept = [await create(service.client, store=True) for _ in range(2)]
        assert all(response["store"] is True for response in kept)
        assert (await create(service.client))["store"] is False
        refused = await service.client.post(PATH, json={"input": "x", "store": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
        assert "at most 2 are allowed" in refused.json()["error"]["message"]
        await service.client.delete(f"{PATH}/{kept[0]['id']}")
        assert (await create(service.client))["store"] is True


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_does_not_fail_for_want_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        monkeypatch.setattr(table, "insert", full)
        answer = await service.client.post(PATH, json={"input": "x", "stream": stream})
        last = answer.text.split("\n\n")[-2] if stream else answer.text
        assert '"store":false' in last
        assert "1 items" in last
        refused = await service.client.post(PATH, json={"input": "x", "store": True})
        assert refused.status_code == 500


async def test_a_response_expires_unless_it_is_continued(tmp_path: Path) -> None:
    store = Store(ServerSettings(data_dir=tmp_path, response_retention_s=3600))

    def keep(name: str, previous: str | None, expires_at: int) -> Work[None]:
        answer = {"id": name, "status": "completed", "output": []}
        whole = json.dumps(answer).encode()
        response = replace(
            finished_response("", previous, b"[]", whole, 3600), expires_at=expires_at
        )
        place = Reservation(store.quotas, "", "responses")
        return partial(table.insert, response=response, reservation=place)

    long_ago, later = 1, 1 << 40
    await store.database.run(keep("first", None, long_ago))
    await store.database.run(keep("left", None, long_ago))
    await store.database.run(keep("second", "first", later))
    expire = partial(table.delete_expired, now=long_ago)
    assert await store.database.run(expire) == 1
    find = partial(table.find_conversation, owner="", last="second", max_bytes=1000)
    assert (await store.database.run(find)).turns == ["second", "first"]
    with pytest.raises(NotFoundError):
        await store.database.run(partial(table.get, owner="", response_id="left"))
    await store.database.run(partial(table.delete, owner="", response_id="second"))
    assert await store.database.run(expire) == 1
    assert await store.database.run(RESPONSES.count_by_status) == RESPONSES.no_rows()
    store.close()


async def online(service: Running, **fields: Any) -> tuple[int, str, str | None]:
    answer = await service.client.post(PATH, json={"input": "x", **fields})
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_without_a_folder_it_says_how(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        assert (await create(service.client))["store"] is False
        for fields, param in (
            ({"store": True}, "store"),
            ({"background": True}, "background"),
            ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ):
            assert await online(service, **fields) == (400, "unsupported_field", param)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            answer = await service.client.request(method, f"{PATH}/resp_x{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_enabled")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"store": "yes"}, "invalid_type", "store"),
        ({"background": 1}, "invalid_type", "background"),
        ({"background": True, "store": False}, "invalid_value", "background"),
        ({"previous_response_id": 7}, "invalid_type", "previous_response_id"),
        ({"previous_response_id": "resp_none"}, "not_found", "previous_response_id"),
        (
            {"previous_response_id": "resp_x", "previous_input_messages": [{}]},
            *("invalid_value", "previous_response_id"),
        ),
    ],
)
async def test_invalid_fields(
    tmp_path: Path, fields: dict[str, Any], code: str, param: str
) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        _, found, named = await online(service, **fields)
        assert (found, named) == (code, param)


async def test_wrong_questions_about_a_response(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        name = (await create(service.client))["id"]
        for query, param in (
            *(("stream=yes", "stream"), ("stream=true", "stream")),
            *(("starting_after=1", "starting_after"), ("include=reasoning", "include")),
            ("stream=true&starting_after=x", "stream"),
        ):
            answer = await service.client.get(f"{PATH}/{name}?{query}")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] in (param, "starting_after")
        for query, status in (("limit=0", 400), ("order=up", 400), ("after=msg_none", 404)):
            answer = await service.client.get(f"{PATH}/{name}/input_items?{query}")
            assert answer.status_code == status
        waiting = await create(service.client, user="wait", background=True)
        assert await online(service, previous_response_id=waiting["id"]) == (
            *(400, "invalid_value"),
            "previous_response_id",
        )
        await service.client.delete(f"{PATH}/{waiting['id']}")
        assert "response aborted" in service.frontend.ended
