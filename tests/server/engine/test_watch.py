"""When silence is a hang, and when it is not."""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from server.engine.process import HangWatch, IdleWatch
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


class Engine:
    """Silent unless it is told to answer."""

    def __init__(self) -> None:
        self.now = 50.0
        self.messages = 0
        self.asked = 0
        self.answers = True

    def watch(self, timeout_s: float) -> HangWatch:
        return HangWatch(timeout_s, lambda: self.messages, self._answer, lambda: self.now)

    async def _answer(self) -> None:
        self.asked += 1
        if self.answers:
            self.messages += 1
        else:
            await asyncio.Event().wait()


async def pass_time(engine: Engine, watch: HangWatch, seconds: float) -> float | None:
    """Look four times a second, as the service does; return the first verdict."""
    for _ in range(int(seconds * 4)):
        engine.now += 0.25
        if (hung := watch.hung_for_s()) is not None:
            return hung
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return None


async def test_an_idle_engine_answers_when_it_is_asked() -> None:
    engine = Engine()
    assert await pass_time(engine, engine.watch(10), 100) is None
    assert 15 <= engine.asked <= 21


async def test_an_engine_that_works_is_not_asked() -> None:
    engine = Engine()
    watch = engine.watch(10)
    for _ in range(50):
        engine.messages += 1
        assert await pass_time(engine, watch, 2) is None
    assert engine.asked == 0


async def test_an_engine_that_does_not_answer_hangs() -> None:
    engine = Engine()
    engine.answers = False
    watch = engine.watch(10)
    started = engine.now
    assert await pass_time(engine, watch, 100) is not None
    assert 10 <= engine.now - started <= 11
    assert engine.asked == 1


async def test_a_long_step_is_no_hang() -> None:
    engine = Engine()
    engine.answers = False
    watch = engine.watch(10)
    for _ in range(5):
        assert await pass_time(engine, watch, 9) is None
        engine.messages += 1
    assert engine.asked == 5


async def test_time_in_which_nobody_looked_does_not_count() -> None:
    engine = Engine()
    engine.answers = False
    watch = engine.watch(10)
    assert await pass_time(engine, watch, 4) is None
    engine.now += 1000
    assert watch.hung_for_s() is None
    engine.messages += 1
    assert await pass_time(engine, watch, 9) is None


async def test_nothing_is_asked_without_a_timeout() -> None:
    engine = Engine()
    engine.answers = False
    assert await pass_time(engine, engine.watch(0), 1000) is None
    assert engine.asked == 0


class Work:
    """Requests of an engine, and what it has computed for them."""

    def __init__(self) -> None:
        self.now = 50.0
        self.requests = 0
        self.computed: float | None = 0.0
        self.reads = 0

    def watch(self, timeout_s: float) -> IdleWatch:
        return IdleWatch(timeout_s, lambda: self.requests, self._read, lambda: self.now)

    def _read(self) -> float | None:
        self.reads += 1
        return self.computed


def pass_idle_time(work: Work, watch: IdleWatch, seconds: float) -> float | None:
    for _ in range(int(seconds * 4)):
        work.now += 0.25
        if (idle := watch.idle_for_s()) is not None:
            return idle
    return None


def test_an_engine_without_requests_may_be_idle() -> None:
    work = Work()
    assert pass_idle_time(work, work.watch(10), 1000) is None
    assert work.reads == 0


def test_an_engine_that_computes_is_not_stalled() -> None:
    work = Work()
    watch, work.requests = work.watch(10), 3
    for _ in range(50):
        assert work.computed is not None
        work.computed += 1
        assert pass_idle_time(work, watch, 8) is None
    assert work.reads <= 50 * 8


def test_an_engine_that_computes_nothing_for_its_requests_is_stalled() -> None:
    work = Work()
    watch = work.watch(10)
    assert pass_idle_time(work, watch, 100) is None
    work.requests = 1
    started = work.now
    assert pass_idle_time(work, watch, 100) is not None
    assert 10 <= work.now - started <= 13


def test_requests_that_end_begin_the_count_anew() -> None:
    work = Work()
    watch = work.watch(10)
    for _ in range(10):
        work.requests = 1
        assert pass_idle_time(work, watch, 9) is None
        work.requests = 0
        assert pass_idle_time(work, watch, 1) is None


def test_nothing_is_stalled_where_other_hosts_compute_or_without_a_timeout() -> None:
    work = Work()
    work.requests, work.computed = 1, None
    assert pass_idle_time(work, work.watch(10), 100) is None
    work.computed = 0.0
    assert pass_idle_time(work, work.watch(0), 100) is None


# ----------------------------------------------------------------------------------------- job pool
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
    pool.timeout_s = 20.0
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


@pytest.mark.slow
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
