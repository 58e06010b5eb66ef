"""Batches over a real socket: every line has one answer, and clients come first."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rbln_backend.reports.metrics import MetricsBoard
from server.observability.metrics import ServerMetrics
from server.storage.batches import ResultFiles, best_rows
from server.storage.database import DataFolder, ExpiryClock
from tests.server.scripted import Running, running
from tests.server.storage.batch_clients import (
    CHAT,
    FILE,
    FORM,
    PURPOSE,
    create,
    ended_lines,
    form,
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


async def test_a_line_that_meets_a_fault_is_tried_three_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.storage.batches._FAULT_PAUSE_S", 0.05)
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await until_ended(service.client, await create(service.client, [line(1, "break")]))
        assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        (bad,) = (await results(service.client, batch["error_file_id"])).values()
        assert bad["response"]["status_code"] == 500


@pytest.mark.parametrize(("after_s", "most"), [(0.001, 5), (5, 1)])
async def test_a_refused_line_is_tried_after_growing_pauses(
    tmp_path: Path, after_s: float, most: int
) -> None:
    """Not before `retry-after`; in the background the same holds for a response."""
    busy = line(1, "busy")
    busy["body"]["after"] = after_s
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        batch = await create(service.client, [busy])
        await asyncio.sleep(0.8)
        assert 1 <= len(service.frontend.ended) <= most
        await service.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert (await until_ended(service.client, batch))["status"] == "cancelled"
        service.frontend.ended.clear()
        body = {"input": "x", "background": True, "do": "busy", "after": after_s}
        assert (await service.client.post("/v1/responses", json=body)).status_code == 200
        await asyncio.sleep(0.8)
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
        await service.until("rbln_admission_in_flight", 3)
        batch = await create(service.client, [line(n, "wait") for n in range(20)])
        await service.until("rbln_batch_lines_running", 5)
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
        await service.until("rbln_batch_lines_running")
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


# -------------------------------------------------------------------------------------------- files
# Files of clients over a real socket: kept whole, listed page by page, each key its own.


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
        await service.until("rbln_batch_lines_running", 8)
        with monkeypatch.context() as patched:
            patched.setattr(DataFolder, "free_bytes", lambda _self: 0)
            service.frontend.go_on.set()
            await service.until("rbln_storage_full")
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
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/files/x/content"),
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches"),
            ("POST", "/v1/batches/x/cancel"),
        ):
            answer = await service.client.request(method, path, json={})
            assert answer.status_code == 501
            assert answer.json()["error"]["code"] == "not_enabled"
            assert "--data-dir" in answer.json()["error"]["message"]


# ------------------------------------------------------------------------------------------ results
# Result files of batches: the event loop waits for none of their disk calls.


@contextmanager
def system_calls_of_this_thread(calls: list[str]) -> Iterator[None]:
    """Note the calls of the module `posix` that the result files make in this thread."""

    def note(frame: FrameType | None, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__module__", None) == "posix":
            while frame is not None:
                if isinstance(frame.f_locals.get("self"), ResultFiles):
                    calls.append(called.__name__)
                frame = frame.f_back

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


async def test_the_event_loop_makes_no_disk_calls(tmp_path: Path) -> None:
    parts = tmp_path / "data" / "parts"
    parts.mkdir(parents=True)
    (parts / "unknown.output").write_bytes(b"x")
    calls: list[str] = []
    with system_calls_of_this_thread(calls):
        async with running(tmp_path, data_dir=tmp_path / "data") as service:
            batch = await until_ended(service.client, await create(service.client, [line(1)]))
    assert batch["request_counts"]["completed"] == 1
    assert not [*parts.iterdir()]
    # Names of paths are no disk calls.
    assert not [name for name in calls if name != "fspath"]


# --------------------------------------------------------------------------------------- spare rows
# Numbers of lines that run beside client requests and without them.


BUCKETS = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("times", "best"),
    [
        pytest.param({}, 8, id="nothing ran"),
        pytest.param({1: (900, 9.0), 8: (900, 18.0)}, 8, id="as it is mostly"),
        pytest.param({4: (900, 9.0), 8: (900, 27.0)}, 4, id="the largest takes thrice as long"),
        pytest.param({4: (900, 9.0), 8: (100, 3.0)}, 8, id="it ran too rarely to say"),
        pytest.param({4: (100, 1.0), 8: (900, 27.0)}, 8, id="the other one did"),
        pytest.param({4: (900, 9.0)}, 8, id="it never ran"),
        pytest.param({4: (900, 9.0), 8: (900, 19.0)}, 8, id="a difference that may be chance"),
        pytest.param({3: (900, 0.9), 8: (900, 18.0)}, 8, id="a bucket that is no more"),
    ],
)
def test_the_bucket_with_the_most_tokens_is_taken(
    times: dict[int, tuple[int, float]], best: int
) -> None:
    assert best_rows(BUCKETS, times) == best


def test_what_the_engines_ran_is_known(tmp_path: Path) -> None:
    metrics = ServerMetrics(tmp_path)
    assert metrics.decode_times() == {}
    for rank in (0, "replica"):
        board = MetricsBoard(tmp_path, rank)
        for bucket in (4, 8, 8):
            board.histogram("rbln_bucket_step_seconds", phase="decode", bucket=bucket).observe(0.5)
        board.histogram("rbln_bucket_step_seconds", phase="prefill", bucket=64).observe(9.0)
    assert metrics.decode_times() == {4: (2, 1.0), 8: (4, 2.0)}
