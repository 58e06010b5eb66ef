"""Stored responses survive every end of a process, and have owners, quotas and an expiry."""

import asyncio
import json
import sqlite3
import threading
import tracemalloc
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import bounds
from server.errors import (
    InvalidTypeError,
    InvalidValueError,
    NotFoundError,
    OverloadedError,
    StorageUnavailableError,
)
from server.request.endpoints import get_route
from server.request.options import Tier
from server.request.record import RequestRecord
from server.settings import ServerSettings
from server.storage import response_table as table
from server.storage.database import RESPONSES, Reservation, Store, Work
from server.storage.response_table import (
    Response,
    StorageOptions,
    Waiting,
    finished_response,
    queued_response,
    shown_request,
)
from server.storage.responses import FairQueue
from tests.server.scripted import Running, ScriptedLauncher, running
from tests.server.storage.batch_clients import bearer
from tests.server.storage.test_batches_engine import Service

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
        mine, other = (bearer(key) for key in ("k1", "k2"))
        name = (await create(service.client, headers=mine))["id"]
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
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

    def keep(name: str, previous: str | None, expires_at: int) -> "Work[None]":
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
            "invalid_value",
            "previous_response_id",
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
            ("stream=yes", "stream"),
            ("stream=true", "stream"),
            ("starting_after=1", "starting_after"),
            ("include=reasoning", "include"),
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
            400,
            "invalid_value",
            "previous_response_id",
        )
        await service.client.delete(f"{PATH}/{waiting['id']}")
        assert "response aborted" in service.frontend.ended


# ------------------------------------------------------------------------------------ conversations
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
        await service.until("rbln_admission_in_flight")
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


def test_what_a_request_continued_is_counted_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_CONTINUED_BYTES", 200_000)
    held = table.ContinuedBytes()
    records = [RequestRecord(get_route(PATH), "POST", 0.0) for _ in range(3)]
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
    turns = [turn(number, TURN_BYTES) for number in range(TURNS)]
    parts = [part for one in turns for part in (one.input, one.output)]
    assert json.loads(items) == [item for part in parts for item in json.loads(part)]
    with pytest.raises(InvalidValueError, match=rf"the {TURNS} turns .* have {found.bytes} bytes"):
        await store.database.read(
            partial(table.find_conversation, owner="", last=last, max_bytes=found.bytes - 1)
        )
    store.close()


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


# ------------------------------------------------------------------------------------ shown request
FUNCTION = {"type": "function", "name": "look"}


def test_an_empty_request_is_shown_by_its_defaults() -> None:
    shown = shown_request({}, {})
    assert shown["tool_choice"] == "auto"
    assert shown["text"] == {"format": {"type": "text"}}
    assert shown["reasoning"] == {"effort": None, "summary": None}
    assert (shown["tools"], shown["metadata"], shown["top_logprobs"]) == ([], {}, 0)
    assert (shown["temperature"], shown["top_p"]) == (1.0, 1.0)
    assert shown["max_output_tokens"] is None


def test_the_models_own_sampling_is_a_default() -> None:
    sampling = {"temperature": 0.6, "max_tokens": 7}
    assert shown_request({}, sampling)["temperature"] == 0.6
    shown = shown_request({"temperature": 0}, sampling)
    assert shown["temperature"] == 0
    assert "max_tokens" not in shown


def test_what_was_sent_is_shown_and_copied() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    body: dict[str, Any] = {
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": schema, "verbosity": "low"},
        "safety_identifier": "s",
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "parallel_tool_calls": False,
    }
    shown = shown_request(body, {})
    body["tools"].clear()
    assert shown["tools"] == [{"description": None, "parameters": None, "strict": None, **FUNCTION}]
    assert shown["text"]["format"] == {"description": None, "strict": False, **schema}
    assert shown["text"]["verbosity"] == "low"
    assert shown["reasoning"] == {"effort": "low", "summary": None}
    for name in ("tool_choice", "safety_identifier", "metadata", "parallel_tool_calls"):
        assert shown[name] == body[name]


@pytest.mark.parametrize("name", ["text", "tools", "reasoning"])
@pytest.mark.parametrize("value", [7, "x", ["x"], None])
def test_what_is_refused_later_is_no_fault_here(name: str, value: Any) -> None:
    assert name in shown_request({name: value}, {})


def test_a_label_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="safety_identifier"):
        shown_request({"safety_identifier": 7}, {})


# --------------------------------------------------------------------------------------- background
KEYS = ("a=k1", "b=k2")
ROWS = 8
"""Of the scripted engine."""


async def ask(service: Running, key: str = "k1", **fields: Any) -> httpx.Response:
    body = {"input": "x", "user": "wait", "background": True, **fields}
    return await service.client.post(PATH, json=body, headers=bearer(key))


async def test_they_are_bounded_for_each_key_and_in_all(tmp_path: Path) -> None:
    limits = {"max_background_per_key": 3, "max_background": 4}
    async with running(tmp_path, data_dir=tmp_path / "data", api_key=KEYS, **limits) as service:
        answers = await asyncio.gather(*(ask(service) for _ in range(9)))
        assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 6}
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("overloaded", "background")
        assert "3 responses of this key" in error["message"]
        assert "at most 3 are allowed" in error["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert (await ask(service, "k2")).status_code == 200
        full = (await ask(service, "k2")).json()["error"]["message"]
        assert "at most 4 are allowed" in full
        name = next(a.json()["id"] for a in answers if a.status_code == 200)
        await service.client.post(f"{PATH}/{name}/cancel", headers=bearer("k1"))
        assert (await ask(service)).status_code == 200
        counted = 'rbln_admission_rejections_total{reason="background"}'
        service.client.headers.update(bearer("k1"))
        assert await service.metric(counted) == 7


async def test_owners_take_turns(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data", api_key=KEYS) as service:
        many = [(await ask(service)).json()["id"] for _ in range(ROWS + 4)]
        one = (await ask(service, "k2")).json()["id"]
        # One ends; the next turn is that of the other key, which came last.
        await service.client.post(f"{PATH}/{many[0]}/cancel", headers=bearer("k1"))
        service.client.headers.update(bearer("k2"))
        await until(service.client, one, "in_progress")
        service.client.headers.update(bearer("k1"))
        waiting = [await shown(service.client, name) for name in many[ROWS:]]
        assert {response["status"] for response in waiting} == {"queued"}


def test_the_next_turn_is_that_of_whoever_runs_least() -> None:
    queue = FairQueue()
    for owner in ("a", "a", "a", "b", "b", "c"):
        queue.add(Waiting(f"{owner}{len(queue)}", owner))
    running_now = Counter({"a": 1})
    order = []
    while (turn := queue.take(running_now)) is not None:
        running_now[turn.owner] += 1
        order.append(turn.id)
    assert order == ["b3", "c5", "a0", "b4", "a1", "a2"]
    assert len(queue) == 0


async def test_they_wait_on_the_disk_and_are_followed_there(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    launcher.launched.set()
    # The stream's status waits for the first event, which comes only when the others end.
    settings = {"data_dir": tmp_path / "data", "stream_commit_s": 0.1}
    async with running(tmp_path, launcher, **settings) as service:
        for _ in range(ROWS):
            await create(service.client, user="wait", background=True)
        last = await create(service.client, "x" * 50_000, background=True)
        body = {"input": "x", "background": True, "stream": True}
        async with service.client.stream("POST", PATH, json=body) as stream:
            frames = stream.aiter_lines()
            while not service.frontend.headers:
                await asyncio.sleep(0.01)
            assert await until_queued(service, 2)
            service.frontend.go_on.set()
            lines = [line async for line in frames if line.startswith("event: ")]
        assert lines[-1] == "event: response.completed"
        assert text(await until(service.client, last["id"], "completed")) == "1 items"


async def until_queued(service: Running, number: int) -> bool:
    async with asyncio.timeout(10):
        while await service.metric('rbln_stored_responses{status="queued"}') != number:
            await asyncio.sleep(0.05)
    return True


async def test_a_stream_that_waits_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        for _ in range(ROWS):
            await create(service.client, user="wait", background=True)
        body = {"input": "x", "background": True, "stream": True}
        sending = asyncio.ensure_future(service.client.post(PATH, json=body))
        assert await until_queued(service, 1)
        page = await service.client.get("/metrics")
        assert page.is_success
        with closing(sqlite3.connect(tmp_path / "data" / "store.sqlite")) as connection:
            query = "SELECT id FROM responses WHERE status = 'queued'"
            (name,) = connection.execute(query).fetchone()
        await service.client.post(f"{PATH}/{name}/cancel")
        assert (await asyncio.wait_for(sending, 10)).status_code == 200
        assert (await shown(service.client, name))["status"] == "cancelled"
