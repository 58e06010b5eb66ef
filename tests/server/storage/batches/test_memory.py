"""Uploading and reading a file takes the memory of one line, not of the file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.server.storage.batches.clients import line, shown, text_of
from tests.server.storage.batches.test_durability import Service

LINES = 50_000
ALLOWED_BYTES = 48 << 20
"""Far less than the file has: what its chunks, its ids and the database's cache may take."""


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.wide
async def test_fifty_thousand_lines_are_taken_in_bounded_memory(tmp_path: Path) -> None:
    content = tmp_path / "in.jsonl"
    with content.open("wb") as file:
        for number in range(LINES):
            one = line(number, "wait")
            one["body"]["messages"][0]["content"] = f"{number} " + "word " * 400
            file.write(text_of([one]))
    assert content.stat().st_size > 2 * ALLOWED_BYTES
    service = Service(tmp_path)
    try:
        async with await service.client() as client:
            client.timeout = 300  # type: ignore[assignment]
            await client.get("/metrics")
            before = peak_bytes(service.process.pid)
            with content.open("rb") as file:
                form = {"file": ("in.jsonl", file), "purpose": (None, "batch")}
                uploaded = await client.post("/v1/files", files=form)
            assert uploaded.json()["bytes"] == content.stat().st_size
            wish = {"input_file_id": uploaded.json()["id"], "completion_window": "24h"}
            wish |= {"endpoint": "/v1/chat/completions"}
            batch = (await client.post("/v1/batches", json=wish)).json()
            async with asyncio.timeout(240):
                while batch["status"] == "validating":
                    await asyncio.sleep(0.1)
                    batch = await shown(client, batch)
            assert (batch["status"], batch["request_counts"]["total"]) == ("in_progress", LINES)
            assert peak_bytes(service.process.pid) - before < ALLOWED_BYTES
    finally:
        service.kill()
