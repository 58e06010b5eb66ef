"""Batches of a real engine by the official client: the answers that clients get, in spare rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

LINES = 30


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    flags = ("--data-dir", str(folder / "data"), "--min-free-bytes", "0")
    with RealServer(checkpoints("llama"), folder, *flags) as up:
        up.until_ready()
        yield up


def ask(client: openai.OpenAI, number: int, **fields: Any) -> Any:
    given = body(number) | fields
    return client.completions.create(
        **{name: given.pop(name) for name in list(given) if name != "ignore_eos"}, extra_body=given
    )


def body(number: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [3 + number, 7, 11 + number],
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }


def submit(client: openai.OpenAI, folder: Path, **fields: Any) -> Any:
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body(n) | fields}
        for n in range(LINES)
    ]
    lines[3]["body"]["max_tokens"] = -1
    path = folder / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with path.open("rb") as content:
        file = client.files.create(file=content, purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def until_ended(client: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + 120
    while batch.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def test_lines_say_what_requests_say(
    server: RealServer, client: openai.OpenAI, tmp_path: Path
) -> None:
    batch = until_ended(client, submit(client, tmp_path))
    assert (batch.status, batch.request_counts.completed) == ("completed", LINES - 1)
    good = {
        one["custom_id"]: one["response"]["body"]
        for one in map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    }
    for number in (0, 17, LINES - 1):
        online = ask(client, number)
        assert good[f"c{number}"]["choices"][0]["text"] == online.choices[0].text
    assert batch.usage.output_tokens == 20 * (LINES - 1)
    assert batch.usage.input_tokens == 3 * (LINES - 1)
    (bad,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert bad["custom_id"] == "c3"
    assert bad["response"]["body"]["error"]["param"] == "max_tokens"
    assert server.metric('rbln_background_rows_total{kind="alone"') > 0
    assert server.metric("rbln_recompiles_after_warmup_total") == 0
    assert next(one.id for one in client.batches.list(limit=1)) == batch.id
    assert {one.purpose for one in client.files.list()} == {"batch", "batch_output"}


def test_streams_beside_a_batch_share_their_buckets(
    server: RealServer, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Three streams have the bucket of four: one row is to spare."""
    alone = [ask(client, n, max_tokens=200) for n in range(3)]
    before = server.metric('rbln_background_rows_total{kind="alone"')
    batch = submit(client, tmp_path, max_tokens=150)
    while server.metric('rbln_background_rows_total{kind="alone"') == before:
        time.sleep(0.01)
    streams = [ask(client, n, max_tokens=200, stream=True) for n in range(3)]
    texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
    assert texts == [answer.choices[0].text for answer in alone]
    assert until_ended(client, batch).request_counts.completed == LINES - 1
    assert server.metric('rbln_background_rows_total{kind="padding"') > 0
