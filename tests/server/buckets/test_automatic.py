"""Buckets that change by the tuner's advice on the recent steps, and back where it was wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from server.buckets.automatic import LEAST_PERIOD_S, AutoBuckets
from server.buckets.changes import BucketChanges, Shares
from tests.server.buckets.scripted_engine import START, ScriptedBuckets


@dataclass
class Observed:
    """Metrics as lists."""

    results: list[tuple[str, str]] = field(default_factory=list)
    savings: list[Shares] = field(default_factory=list)

    def observe_bucket_change(self, reason: str, result: str) -> None:
        self.results.append((reason, result))

    def observe_bucket_effect(self, savings: Shares) -> None:
        self.savings.append(savings)


@dataclass
class Tuned:
    """An engine with automatic changes."""

    engine: ScriptedBuckets
    observed: Observed
    changes: BucketChanges
    auto: AutoBuckets
    rows: list[tuple[int, ...]]
    now: float = 0.0

    async def look(self) -> None:
        await self.auto.look()
        await self.changes.wait()

    def skewed_load(self, seconds: float = 0.01) -> None:
        """Count steps of 9 rows, for which 32 is too large, in proportion to their bucket."""
        for size in (1, 9):
            bucket = next(b for b in self.engine.tables["decode"] if b >= size)
            self.engine.step(size, seconds * bucket, 500)


@asynccontextmanager
async def tuned(*, applies: bool = True) -> AsyncIterator[Tuned]:
    engine, observed = ScriptedBuckets(), Observed()
    rows: list[tuple[int, ...]] = []
    changes = BucketChanges(lambda: engine, observed, grace_s=0.0, take_decode=rows.append)
    made: list[Tuned] = []
    auto = AutoBuckets(
        changes,
        lambda: engine,
        window_s=600.0,
        least_saving=0.1,
        applies=applies,
        clock=lambda: made[0].now,
    )
    made.append(Tuned(engine, observed, changes, auto, rows))
    yield made[0]
    changes.close()


async def test_a_saving_is_applied_once_an_hour() -> None:
    async with tuned() as t:
        await t.look()
        t.skewed_load()
        await t.look()
        assert t.observed.results == [("auto", "running"), ("auto", "done")]
        assert 9 in t.engine.tables["decode"]
        assert t.rows == [tuple(t.engine.tables["decode"])], "batches use the padding of these"
        assert t.engine.tables["prefill"] == START["prefill"]
        t.skewed_load()
        await t.look()
        # Steps of 9 rows took 0.32 s and take 0.09 s.
        assert round(t.observed.savings[-1]["decode"], 2) == round(1 - 0.10 / 0.33, 2)
        t.engine.step(1, 0.01, 500)
        t.engine.step(20, 0.32, 500)
        await t.look()
        assert len(t.observed.results) == 2, "the hour is not over"
        t.now += LEAST_PERIOD_S
        t.engine.step(1, 0.01, 500)
        t.engine.step(20, 0.32, 500)
        await t.look()
        assert t.observed.results[2:] == [("auto", "running"), ("auto", "done")]


async def test_sizes_that_measure_worse_go_back() -> None:
    async with tuned() as t:
        await t.look()
        t.skewed_load()
        await t.look()
        t.skewed_load(seconds=0.05)
        await t.look()
        assert t.observed.results[2:] == [("revert", "running"), ("revert", "done")]
        assert t.engine.tables == START


async def test_small_savings_and_switched_off_change_nothing() -> None:
    async with tuned() as t:
        await t.look()
        t.engine.step(8, 0.08, 500)
        t.engine.step(31, 0.32, 500)
        await t.look()
        assert t.observed.results == []
    async with tuned(applies=False) as t:
        await t.look()
        t.skewed_load()
        await t.look()
        assert t.observed.results == []
