"""Anthropic's batches by its own client: each request has one result, and is seen by its key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from server.storage.batches.line_results import Line, result_of
from server.storage.clock import ExpiryClock
from server.storage.loopback import LoopbackResponse
from tests.server.scripted import Running, running
from tests.server.storage.batches.clients import ended_lines

PATH = "/v1/messages/batches"


def request(number: int, do: str = "answer", **params: Any) -> Any:
    body = {"model": "scripted", "max_tokens": 5, "do": do, **params}
    return {
        "custom_id": f"c{number}",
        "params": {"messages": [{"role": "user", "content": "x"}], **body},
    }


@asynccontextmanager
async def client_of(service: Running, key: str = "none") -> AsyncIterator[Any]:
    url = f"http://127.0.0.1:{service.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client.messages.batches


async def until_ended(batches: Any, batch: Any) -> Any:
    async with asyncio.timeout(60):
        while batch.processing_status != "ended":
            await asyncio.sleep(0.02)
            batch = await batches.retrieve(batch.id)
    return batch


async def results(batches: Any, batch: Any) -> dict[str, Any]:
    """The results by custom_id; none may be there twice."""
    found = [one async for one in await batches.results(batch.id)]
    named = {one.custom_id: one.result for one in found}
    assert len(named) == len(found)
    return named


async def test_every_request_has_its_result(tmp_path: Path) -> None:
    requests = [request(n, "refuse" if n % 10 == 0 else "answer") for n in range(1, 41)]
    requests.append(request(41, stream=True))
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        async with client_of(service) as batches:
            batch = await batches.create(requests=requests)
            assert batch.id.startswith("msgbatch_")
            assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 41)
            assert (batch.results_url, batch.ended_at) == (None, None)
            assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
            batch = await until_ended(batches, batch)
            counts = batch.request_counts
            assert (counts.processing, counts.succeeded, counts.errored) == (0, 36, 5)
            assert (counts.canceled, counts.expired) == (0, 0)
            assert batch.ended_at >= batch.created_at
            found = await results(batches, batch)
            assert set(found) == {one["custom_id"] for one in requests}
            assert found["c1"].type == "succeeded"
            assert found["c1"].message.ok is True
            for name, code in (("c10", "context_length_exceeded"), ("c41", "unsupported_field")):
                error = found[name].error
                assert (found[name].type, error.type) == ("errored", "error")
                assert (error.error.type, error.error.code) == ("invalid_request_error", code)
        # Neither API has the other's, and lines of both are counted together.
        assert (await service.client.get("/v1/batches")).json()["data"] == []
        assert (await service.client.get(f"/v1/batches/{batch.id}")).status_code == 404
        assert (await service.client.post(f"/v1/batches/{batch.id}/cancel")).status_code == 404
        assert await service.metric('rbln_batch_lines_total{result="completed"}') == 36


async def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    requests = [request(n, "answer" if n < 5 else "wait") for n in range(30)]
    async with running(tmp_path, data_dir=tmp_path / "data") as service, client_of(service) as it:
        batch = await it.create(requests=requests)
        await ended_lines(service, completed=5)
        with pytest.raises(anthropic.BadRequestError, match="has not ended"):
            await it.delete(batch.id)
        answer = await service.client.get(f"{PATH}/{batch.id}/results")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        batch = await it.cancel(batch.id)
        assert (batch.processing_status, batch.request_counts.processing) == ("canceling", 30)
        batch = await until_ended(it, batch)
        assert (batch.request_counts.succeeded, batch.request_counts.canceled) == (5, 25)
        assert batch.cancel_initiated_at <= batch.ended_at
        types = [result.type for result in (await results(it, batch)).values()]
        assert (types.count("succeeded"), types.count("canceled")) == (5, 25)
        with pytest.raises(anthropic.BadRequestError, match="cannot be cancelled"):
            await it.cancel(batch.id)


async def test_expired_requests_have_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(1), request(2, "refuse"), *(request(n, "wait") for n in range(3, 13))]
    async with running(tmp_path, data_dir=tmp_path / "data") as service, client_of(service) as it:
        batch = await it.create(requests=requests)
        await ended_lines(service, completed=1, failed=1)
        # Set the clock, as a short window could end before the first answer on a busy machine.
        monkeypatch.setattr(ExpiryClock, "now", lambda _: int(batch.expires_at.timestamp()))
        counts = (await until_ended(it, batch)).request_counts
        assert (counts.succeeded, counts.errored, counts.expired) == (1, 1, 10)
        assert (await results(it, batch))["c3"].type == "expired"


async def test_deleting_takes_the_files_along(tmp_path: Path) -> None:
    requests = [request(1), request(2, "refuse")]
    async with running(tmp_path, data_dir=tmp_path / "data") as service, client_of(service) as it:
        batch = await until_ended(it, await it.create(requests=requests))
        files = (await service.client.get("/v1/files")).json()["data"]
        assert len(files) == 3
        gone = await it.delete(batch.id)
        assert (gone.id, gone.type) == (batch.id, "message_batch_deleted")
        with pytest.raises(anthropic.NotFoundError) as raised:
            await it.retrieve(batch.id)
        assert raised.value.body["type"] == "error"
        assert raised.value.body["error"]["type"] == "not_found_error"
        assert (await service.client.get("/v1/files")).json()["data"] == []


def test_a_prompt_is_counted_in_all_its_parts() -> None:
    usage = b'{"input_tokens":5,"cache_creation_input_tokens":32,"cache_read_input_tokens":16,'
    body = b'{"usage":' + usage + b'"output_tokens":7}}'
    answer = result_of(Line("msgbatch_a", 1, "c", 0, 9), LoopbackResponse(200, "", body))
    assert (answer.input_tokens, answer.cached_tokens, answer.output_tokens) == (53, 16, 7)


async def test_pages_go_both_ways(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service, client_of(service) as it:
        for _ in range(5):
            await it.create(requests=[request(1)])
        ids = [one.id async for one in it.list(limit=2)]
        assert len(set(ids)) == 5
        page = await it.list(limit=2)
        assert ([one.id for one in page.data], page.has_more) == (ids[:2], True)
        assert (page.first_id, page.last_id) == (ids[0], ids[1])
        before = await it.list(limit=2, before_id=ids[3])
        assert ([one.id for one in before.data], before.has_more) == (ids[1:3], True)
        back = [one.id async for one in it.list(limit=2, before_id=ids[4])]
        assert back == ids[2:4] + ids[:2]
        for query, code, param in (
            ({"before_id": ids[0], "after_id": ids[1]}, "invalid_value", "before_id"),
            ({"after_id": "msgbatch_x"}, "not_found", "after_id"),
            ({"limit": 1001}, "invalid_value", "limit"),
        ):
            error = (await service.client.get(PATH, params=query)).json()["error"]
            assert (error["code"], error["param"]) == (code, param)


async def test_a_batch_belongs_to_its_key(tmp_path: Path) -> None:
    settings = {"api_key": ["one=1", "two=2"], "max_batches_per_key": 1}
    async with (
        running(tmp_path, data_dir=tmp_path / "data", **settings) as service,
        client_of(service, "1") as mine,
        client_of(service, "2") as other,
    ):
        batch = await mine.create(requests=[request(1, "wait")])
        with pytest.raises(anthropic.APIStatusError) as raised:
            await mine.create(requests=[request(1)])
        assert raised.value.status_code == 507
        assert raised.value.body["error"]["code"] == "storage_full"
        for ask in (other.retrieve, other.cancel, other.delete, other.results):
            with pytest.raises(anthropic.NotFoundError):
                await ask(batch.id)
        assert (await other.list()).data == []
        assert (await service.client.get(PATH)).json()["error"]["type"] == "authentication_error"
        # What was refused left no file.
        headers = {"authorization": "Bearer 1"}
        assert len((await service.client.get("/v1/files", headers=headers)).json()["data"]) == 1


async def test_without_a_folder_it_says_how(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        for method, path in (
            *(("POST", PATH), ("GET", PATH), ("GET", f"{PATH}/x"), ("DELETE", f"{PATH}/x")),
            *(("POST", f"{PATH}/x/cancel"), ("GET", f"{PATH}/x/results")),
        ):
            answer = await service.client.request(method, path)
            assert (answer.status_code, answer.json()["type"]) == (501, "error")
            assert answer.json()["error"]["code"] == "not_enabled"
            assert "--data-dir" in answer.json()["error"]["message"]
