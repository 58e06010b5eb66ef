"""GET and POST /admin/buckets: checks, progress, results, and the admin key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.server.buckets.scripted_engine import START, ScriptedBuckets
from tests.server.scripted import Running, running

PATH = "/admin/buckets"
SIZES = {"decode": [3, 32]}


def _with_buckets(service: Running, **options: Any) -> ScriptedBuckets:
    service.frontend.buckets = engine = ScriptedBuckets(**options)
    return engine


async def _ended(service: Running) -> dict[str, Any]:
    while (status := (await service.client.get(PATH)).json())["change"] is not None:
        await asyncio.sleep(0.01)
    return dict(status)


async def test_a_change_reports_its_progress_and_its_result(tmp_path: Path) -> None:
    async with running(tmp_path, bucket_grace_s=0.0) as service:
        engine = _with_buckets(service)
        answer = await service.client.post(PATH, json=SIZES)
        assert answer.status_code == 202
        change = answer.json()["change"]
        assert (change["decode"], change["prefill"]) == ([3, 32], START["prefill"])
        again = await service.client.post(PATH, json=SIZES)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "bucket_change_running")
        status = await _ended(service)
        assert (status["decode"], status["prefill"]) == ([3, 32], START["prefill"])
        last = status["last"]
        assert (last["result"], last["reason"], last["graphs"]) == (
            "done",
            "request",
            {"loaded": 2},
        )
        assert last["old_decode"] == START["decode"]
        while not engine.released:
            await asyncio.sleep(0.01)
        done = 'rbln_bucket_changes_total{reason="request",result="done"}'
        assert await service.metric(done) == 1
        assert await service.metric("rbln_bucket_change_running") == 0


async def test_a_failed_change_leaves_the_sizes(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        _with_buckets(service, error="no memory")
        await service.client.post(PATH, json=SIZES)
        status = await _ended(service)
        assert (status["last"]["result"], status["last"]["error"]) == ("failed", "no memory")
        assert status["decode"] == START["decode"]


@pytest.mark.parametrize(
    ("body", "param", "limit"),
    [
        ({}, "decode", '"auto"'),
        ({"decode": []}, "decode", "at least one"),
        ({"decode": [8, 4, 32]}, "decode", "ascending"),
        ({"decode": [8, 8, 32]}, "decode", "duplicates"),
        ({"decode": [0, 32]}, "decode", "1 or more"),
        ({"decode": [1, 64]}, "decode", "max_num_seqs 32"),
        ({"decode": [1, 16]}, "decode", "max_num_seqs 32"),
        ({"prefill": [64, 512]}, "prefill", "max_num_batched_tokens 256"),
        ({"prefill": "auto"}, "prefill", "recorded"),
        ({"prefill": "many"}, "prefill", "many"),
        ({"decode": [True, 32]}, "decode", "integer"),
    ],
)
async def test_other_sets_are_refused(
    tmp_path: Path, body: dict[str, Any], param: str, limit: str
) -> None:
    async with running(tmp_path) as service:
        engine = _with_buckets(service)
        answer = await service.client.post(PATH, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert limit in error["message"]
        assert engine.wanted is None


async def test_an_engine_that_cannot_change_says_why(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        assert (await service.client.get(PATH)).json()["error"]["code"] == "unsupported_operation"
        _with_buckets(service, refusal="several ranks")
        answer = await service.client.post(PATH, json=SIZES)
        assert answer.status_code == 400
        assert "several ranks" in answer.json()["error"]["message"]


async def test_it_needs_the_admin_key(tmp_path: Path) -> None:
    async with running(tmp_path, admin_key=("secret-of-admins",), api_key=("sk",)) as service:
        with_key = {"authorization": "Bearer sk"}
        assert (await service.client.get(PATH, headers=with_key)).status_code == 403
        assert (await service.client.post(PATH, json=SIZES)).status_code == 401
