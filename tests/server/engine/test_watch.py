"""When silence is a hang, and when it is not."""

from __future__ import annotations

import asyncio

from server.engine.watch import HangWatch


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
