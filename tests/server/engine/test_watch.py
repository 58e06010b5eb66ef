"""When silence is a hang, and when it is not."""

from __future__ import annotations

import asyncio

from server.engine.watch import HangWatch, IdleWatch


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
