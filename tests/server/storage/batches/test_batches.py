"""Batches over a real socket: every line has one answer, and clients come first."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from server.storage.database import ExpiryClock
from tests.server.scripted import running
from tests.server.storage.batches.clients import (
    CHAT,
    create,
    ended_lines,
    line,
    results,
    shown,
    text_of,
    until_ended,
    upload,
)


async def test_every_line_has_its_answer(tmp_path: Path) -> None:
    lines = [line(n, "refuse" if n % 10 == 0 else "answer") for n in range(1, 101)]
    lines.append(line(101, stream=True))
    lines[-1]["body"]["stream"] = lines[-1].pop("stream")
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await create(service.client, lines, metadata={"of": "tests"})
        assert (batch["object"], batch["status"]) == ("batch", "validating")
        batch = await until_ended(service.client, batch)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 101, "completed": 90, "failed": 11}
        assert (batch["metadata"], batch["model"]) == ({"of": "tests"}, "scripted")
        moments = ("created", "in_progress", "finalizing", "completed")
        times = [batch[f"{name}_at"] for name in moments]
        assert times == sorted(times)
        good = await results(service.client, batch["output_file_id"])
        bad = await results(service.client, batch["error_file_id"])
        assert set(good) | set(bad) == {one["custom_id"] for one in lines}
        assert all(one["response"]["body"] == {"ok": True} for one in good.values())
        assert all(one["response"]["request_id"] for one in good.values())
        assert bad["c10"]["response"]["status_code"] == 400
        assert bad["c10"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
        assert bad["c101"]["response"]["body"]["error"]["code"] == "unsupported_field"
        assert await service.metric('rbln_batch_lines_total{result="completed"}') == 90
        # None of it is a request of a client's.
        page = (await service.client.get("/metrics")).text
        assert (
            f'rbln_http_requests_total{{code="200",method="POST",outcome="ok",route="{CHAT}'
            not in page
        )


@pytest.mark.parametrize("metadata", ["[" + "[]," * 20_000 + "[]]", '"' + "x" * 270_000 + '"'])
async def test_bodies_of_batches_have_a_size_limit(tmp_path: Path, metadata: str) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        body = f'{{"metadata": {metadata}}}'
        headers = {"content-type": "application/json"}
        answer = await service.client.post("/v1/batches", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_line_that_meets_a_fault_is_tried_three_times(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await until_ended(service.client, await create(service.client, [line(1, "break")]))
        assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        (bad,) = (await results(service.client, batch["error_file_id"])).values()
        assert bad["response"]["status_code"] == 500


@pytest.mark.parametrize(("after_s", "most"), [(0.001, 6), (5, 1)])
async def test_a_refused_line_is_tried_after_growing_pauses(
    tmp_path: Path, after_s: float, most: int
) -> None:
    """Not before `retry-after`; in the background the same holds for a response."""
    busy = line(1, "busy")
    busy["body"]["after"] = after_s
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await create(service.client, [busy])
        await asyncio.sleep(2.5)
        assert 1 <= len(service.frontend.ended) <= most
        await service.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert (await until_ended(service.client, batch))["status"] == "cancelled"
        service.frontend.ended.clear()
        body = {"input": "x", "background": True, "do": "busy", "after": after_s}
        assert (await service.client.post("/v1/responses", json=body)).status_code == 200
        await asyncio.sleep(2.5)
        assert 1 <= len(service.frontend.ended) <= most


async def test_a_batch_that_is_validated_stops_no_other(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        # Opening a pipe to read waits for its writer.
        slow_id = await upload(service.client, text_of([line(1)]))
        pipe = tmp_path / "data" / "files" / slow_id
        pipe.unlink()
        os.mkfifo(pipe)
        wish = {"input_file_id": slow_id, "endpoint": CHAT, "completion_window": "24h"}
        slow = (await service.client.post("/v1/batches", json=wish)).json()
        other = await create(service.client, [line(1)])
        try:
            async with asyncio.timeout(10):
                assert (await until_ended(service.client, other))["status"] == "completed"
            assert (await shown(service.client, slow))["status"] == "validating"
        finally:
            await asyncio.to_thread(pipe.write_bytes, b"")
        assert (await until_ended(service.client, slow))["status"] == "failed"


async def test_lines_take_the_rows_that_clients_leave(tmp_path: Path) -> None:
    """The scripted engine has one bucket, of eight rows."""
    async with running(tmp_path, data_dir=tmp_path / "data", max_in_flight=6) as service:
        online = [
            asyncio.create_task(service.client.post(CHAT, json={"do": "wait"})) for _ in range(3)
        ]
        while await service.metric("rbln_admission_in_flight") < 3:
            await asyncio.sleep(0.01)
        batch = await create(service.client, [line(n, "wait") for n in range(20)])
        while await service.metric("rbln_batch_lines_running") < 5:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert await service.metric("rbln_batch_lines_running") == 5
        # They hold no permit: of six, three are free.
        assert await service.metric("rbln_admission_in_flight") == 3
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200
        service.frontend.go_on.set()
        assert all(answer.status_code == 200 for answer in await asyncio.gather(*online))
        assert (await until_ended(service.client, batch))["request_counts"]["completed"] == 20


async def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    lines = [line(n, "answer" if n < 5 else "wait") for n in range(30)]
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await create(service.client, lines)
        while batch["request_counts"]["completed"] < 5:
            await asyncio.sleep(0.02)
            batch = await shown(service.client, batch)
        answer = await service.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert answer.json()["status"] == "cancelling"
        batch = await until_ended(service.client, batch)
        assert batch["status"] == "cancelled"
        assert "answer aborted" in service.frontend.ended
        assert len(await results(service.client, batch["output_file_id"])) == 5
        never = await results(service.client, batch["error_file_id"])
        assert {one["error"]["code"] for one in never.values()} == {"batch_cancelled"}
        assert len(never) == 25
        again = await service.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.json()["error"]["code"] == "invalid_value"


async def test_lines_whose_file_is_gone_say_so(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await create(service.client, [line(n, "wait") for n in range(30)])
        while not await service.metric("rbln_batch_lines_running"):
            await asyncio.sleep(0.01)
        await service.client.delete(f"/v1/files/{batch['input_file_id']}")
        service.frontend.go_on.set()
        batch = await until_ended(service.client, batch)
        assert batch["status"] == "completed"
        bad = await results(service.client, batch["error_file_id"])
        assert {one["response"]["body"]["error"]["code"] for one in bad.values()} == {"not_found"}
        good = await results(service.client, batch["output_file_id"])
        assert len(good) + len(bad) == 30


async def test_expired_lines_have_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await create(service.client, [line(1), *(line(n, "wait") for n in range(2, 12))])
        await ended_lines(service, completed=1)
        # Set the clock, as a short window could end before the first answer on a busy machine.
        monkeypatch.setattr(ExpiryClock, "now", lambda _: batch["expires_at"])
        batch = await until_ended(service.client, batch)
        assert batch["status"] == "expired"
        assert set(await results(service.client, batch["output_file_id"])) == {"c1"}
        never = await results(service.client, batch["error_file_id"])
        assert {one["error"]["code"] for one in never.values()} == {"batch_expired"}


async def test_asking_twice_makes_one_batch(tmp_path: Path) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        client = service.client
        wish = {
            "input_file_id": await upload(client, text_of([line(1)])),
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        key = {"idempotency-key": "once"}
        answers = [await client.post("/v1/batches", json=wish, headers=key) for _ in range(2)]
        assert len({answer.json()["id"] for answer in answers}) == 1
        other = {**wish, "metadata": {"a": "b"}}
        refused = await client.post("/v1/batches", json=other, headers=key)
        assert refused.status_code == 400
        assert "once" in refused.json()["error"]["message"]


async def test_a_key_has_so_many_open_batches(tmp_path: Path) -> None:
    settings = {"data_dir": tmp_path / "data", "max_batches_per_key": 1}
    async with running(tmp_path, **settings) as service:
        first = await create(service.client, [line(1, "wait")])
        wish = {
            "input_file_id": await upload(service.client, text_of([line(1)])),
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        refused = await service.client.post("/v1/batches", json=wish)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
        listed = (await service.client.get("/v1/batches")).json()
        assert [batch["id"] for batch in listed["data"]] == [first["id"]]
