"""Job tables and their loop."""

from __future__ import annotations

import asyncio

import pytest

from server.storage.database import BATCHES, RESPONSES, TABLES, JobTable
from server.storage.jobs import JobLoop


@pytest.mark.parametrize("table", [BATCHES, RESPONSES])
def test_open_rows_have_a_partial_index(table: JobTable) -> None:
    text = " ".join(TABLES.split())
    assert (
        f"ON {table.name} (" in text.split(f"WHERE {table.is_open};")[0].split("CREATE INDEX")[-1]
    )


async def test_a_failed_turn_is_logged_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = asyncio.Queue[int]()

    async def turn() -> None:
        await asyncio.sleep(0)
        turns.put_nowait(0)
        loop.wake()
        if turns.qsize() == 1:
            raise RuntimeError("broken")

    loop = JobLoop("work", turn)
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(10):
        while turns.qsize() < 2:
            await asyncio.sleep(0)
    task.cancel()
    assert "work: a turn failed" in caplog.text
