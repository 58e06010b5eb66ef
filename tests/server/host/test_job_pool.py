"""Processes that answer jobs: replaced when they hang or crash, never waited for without end."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from server.host.job_pool import (
    JobCrashedError,
    JobPool,
    JobSpentError,
    JobTimeoutError,
    PoolFullError,
    WorkerStartError,
    limit_processor_time,
    uncounted_processor_time,
)


def answer_jobs(pipe: Connection) -> None:
    """A process of the pool that does as its jobs say."""
    pipe.send_bytes(b"ready")
    while True:
        job = pipe.recv_bytes()
        if job == b"hang":
            time.sleep(600)
        if job == b"crash":
            os._exit(11)
        if job == b"prepare":
            limit_processor_time(0.1)
            with uncounted_processor_time():
                burn(0.2)
        if job == b"spend":
            burn(0.2)
        pipe.send_bytes(str(os.getpid()).encode() + b" " + job)


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def start_process(pipe: Connection) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(
        target=answer_jobs, args=(pipe,), daemon=True, name="jobs"
    )
    process.start()
    return process


def started() -> list[BaseProcess]:
    """Those of the pool; other tests have processes of their own."""
    return [process for process in multiprocessing.active_children() if process.name == "jobs"]


@pytest.fixture
async def pool() -> AsyncIterator[JobPool]:
    yield JobPool("jobs", start_process, size=1, timeout_s=1.0)
    for process in started():
        process.kill()
        process.join(5)


async def test_a_process_is_replaced_when_it_hangs_or_crashes(pool: JobPool) -> None:
    first = await pool.run(b"one")
    assert await pool.run(b"one") == first
    with pytest.raises(JobTimeoutError):
        await pool.run(b"hang")
    second = await pool.run(b"one")
    assert second != first
    with pytest.raises(JobCrashedError):
        await pool.run(b"crash")
    third = await pool.run(b"one")
    assert third not in (first, second)
    assert await pool.run(b"x" * (1 << 20)) == third.removesuffix(b"one") + b"x" * (1 << 20)
    assert len(started()) == 1


async def test_a_hanging_job_holds_up_only_so_many(pool: JobPool) -> None:
    jobs = [asyncio.create_task(pool.run(b"hang"))]
    await asyncio.sleep(0)
    jobs += [asyncio.create_task(pool.run(b"one")) for _ in range(9)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(results[0], JobTimeoutError)
    assert [type(result) for result in results[1:]] == [bytes] * 8 + [PoolFullError]


async def test_a_process_can_be_there_before_its_first_job(pool: JobPool) -> None:
    assert started() == []
    await pool.start_one()
    (process,) = started()
    assert await pool.run(b"one") == b"%d one" % process.pid


async def test_what_a_process_prepares_does_not_count_as_its_job(pool: JobPool) -> None:
    assert (await pool.run(b"prepare")).endswith(b"prepare")
    with pytest.raises(JobSpentError):
        await pool.run(b"spend")


async def test_who_leaves_while_a_process_starts_leaves_a_pool_that_works(pool: JobPool) -> None:
    asking = asyncio.create_task(pool.run(b"one"))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await pool.run(b"two")).endswith(b" two")
    assert len(started()) == 1


async def test_a_start_that_hangs_is_given_up_and_used_when_it_goes_on() -> None:
    go_on = threading.Event()

    def start_late(pipe: Connection) -> BaseProcess:
        go_on.wait(20)
        return start_process(pipe)

    pool = JobPool("jobs", start_late, size=1, timeout_s=5.0, start_timeout_s=0.2)
    for _ in range(2):
        with pytest.raises(WorkerStartError):
            await pool.run(b"one")
    go_on.set()
    async with asyncio.timeout(20):
        while True:
            try:
                answer = await pool.run(b"two")
                break
            except WorkerStartError:
                continue
    assert answer.endswith(b" two")
    for process in started():
        process.kill()
        process.join(5)
