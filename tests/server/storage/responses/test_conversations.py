"""Conversations are bounded in bytes, one by one and together, and read without being built."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from server import bounds
from server.errors import InvalidValueError, OverloadedError, StorageUnavailableError
from server.request.endpoints import route_of
from server.request.options import Tier
from server.request.record import RequestRecord
from server.settings import ServerSettings
from server.storage import response_table as table
from server.storage.database import Reservation, Store
from server.storage.response_table import (
    Response,
    StorageOptions,
    finished_response,
    queued_response,
)
from tests.server.scripted import running
from tests.server.storage.responses.test_stored_responses import PATH, create, shown, text

TURNS, TURN_BYTES = 20, 100_000


async def test_a_conversation_is_bounded_in_bytes(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "max_conversation_bytes": 4000}
    async with running(tmp_path, **settings) as service:
        first = await create(service.client, "x" * 3000)
        second = await create(service.client, "y" * 2000, previous_response_id=first["id"])
        assert text(second) == "3 items"
        body = {"input": "z", "previous_response_id": second["id"]}
        for path in (PATH, f"{PATH}/input_tokens"):
            answer = await service.client.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_value")
            assert error["param"] == "previous_response_id"
            size = int(error["message"].split(" have ")[1].split(" bytes")[0])
            assert 5000 < size < 6000
            assert "at most 4000 are allowed." in error["message"]
        # Nothing else is.
        assert (await shown(service.client, second["id"]))["status"] == "completed"


async def test_conversations_in_progress_are_bounded_together(tmp_path: Path) -> None:
    settings = {"max_conversation_bytes": 150_000, "max_continued_bytes": 150_000}
    async with running(tmp_path, data_dir=tmp_path / "data", **settings) as service:
        large = (await create(service.client, "x" * 100_000))["id"]
        small = (await create(service.client))["id"]
        body = {"input": "x", "user": "wait", "previous_response_id": large}
        waiting = asyncio.ensure_future(service.client.post(PATH, json=body))
        while await service.metric("rbln_admission_in_flight") < 1:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        refused = await service.client.post(PATH, json={**body, "user": "me"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "overloaded")
        assert "at most 150000 are allowed together" in error["message"]
        assert int(refused.headers["retry-after"]) > 0
        counted = 'rbln_admission_rejections_total{reason="conversations"}'
        assert await service.metric(counted) == 1
        assert text(await create(service.client, previous_response_id=small)) == "3 items"
        service.frontend.go_on.set()
        assert (await waiting).status_code == 200
        assert text(await create(service.client, previous_response_id=large)) == "3 items"


def test_what_a_request_continued_is_counted_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "MAX_CONTINUED_BYTES", 200_000)
    held = table.ContinuedBytes()
    records = [RequestRecord(route_of(PATH), "POST", 0.0) for _ in range(3)]
    held.hold(150_000, records[0])
    with pytest.raises(OverloadedError, match=r"has 150000 bytes and those .* now have 150000"):
        held.hold(150_000, records[1])
    for _ in range(10):
        held.hold(60_000, records[2])
    for end in records[0].on_end:
        end()
    held.hold(150_000, records[1])


def turn(number: int, size: int) -> Response:
    items = json.dumps([{"type": "message", "role": "user", "content": "x" * size}]).encode()
    part = {"type": "output_text", "text": "y" * size}
    output = [{"type": "message", "content": [part]}]
    answer = {"id": f"resp_{number}", "status": "completed", "output": output, "text": "z" * size}
    previous = f"resp_{number - 1}" if number else None
    return finished_response("", previous, items, json.dumps(answer).encode(), 0)


async def stored(folder: Path) -> Store:
    store = Store(ServerSettings(data_dir=folder))
    for number in range(TURNS):
        place = Reservation(store.quotas, "", "responses")
        insert = partial(table.insert, response=turn(number, TURN_BYTES), reservation=place)
        await store.database.run(insert)
    return store


async def test_a_chain_is_measured_without_its_items_and_joined_as_bytes(tmp_path: Path) -> None:
    store = await stored(tmp_path)
    last = f"resp_{TURNS - 1}"
    find = partial(table.find_conversation, owner="", last=last, max_bytes=1 << 30)
    tracemalloc.start()
    try:
        found = await store.database.read(find)
        _, for_sizes = tracemalloc.get_traced_memory()
        items = await store.database.read(
            partial(table.conversation_items, owner="", conversation=found)
        )
        _, for_items = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert for_sizes < TURN_BYTES
    assert for_items < 2.2 * found.bytes
    assert 0 <= found.bytes - len(items) <= 2 * 2 * TURNS
    expected = [item for n in range(TURNS) for item in items_of(turn(n, TURN_BYTES))]
    assert json.loads(items) == expected
    with pytest.raises(InvalidValueError, match=rf"the {TURNS} turns .* have {found.bytes} bytes"):
        await store.database.read(
            partial(table.find_conversation, owner="", last=last, max_bytes=found.bytes - 1)
        )
    store.close()


def items_of(response: Response) -> list[Any]:
    return [*json.loads(response.input), *json.loads(response.output)]


async def test_reads_wait_for_no_write(tmp_path: Path) -> None:
    store = await stored(tmp_path)
    go_on = threading.Event()
    writing = asyncio.ensure_future(store.database.run(lambda _: go_on.wait(20)))
    reading = [
        asyncio.ensure_future(store.database.read(lambda _: go_on.wait(20))) for _ in range(3)
    ]
    get = partial(table.get, owner="", response_id="resp_0")
    found = await asyncio.wait_for(store.database.read(get), 10)
    assert found.status == "completed"
    assert not writing.done()
    go_on.set()
    await asyncio.gather(writing, *reading)
    with pytest.raises(StorageUnavailableError, match="readonly"):
        await store.database.read(lambda db: db.execute("DELETE FROM responses").rowcount)
    store.close()


HOSTILE = b"[" + b"[]," * 130_000 + b"[]]"


def test_answers_and_requests_are_not_built() -> None:
    whole = b'{"id":"resp_a","status":"completed","tools":' + HOSTILE + b',"output":' + HOSTILE
    raw = b'{"model":"m","tools":' + HOSTILE + b',"background":true}'
    options = StorageOptions(store=True, background=True, previous=None, stream=False, items=b"[]")

    def work() -> tuple[Response, Response]:
        response = finished_response("", None, HOSTILE, whole + b"}", 0)
        waiting = queued_response("", options, raw, Tier.DEFAULT, shown={"model": "m"}, keep_s=0)
        return response, waiting

    work()
    tracemalloc.start()
    try:
        response, waiting = work()
        response.shown()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(whole)
    assert json.loads(response.shown()) == json.loads(whole + b"}")
    request = json.loads(waiting.request or b"")
    assert (request["background"], request["store"], request["model"]) == (False, False, "m")
