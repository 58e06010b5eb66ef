"""Samples of the traffic: intervals, how many are kept, numbers, failed readings."""

from __future__ import annotations

import asyncio
import dataclasses

from server.host.tasks import background_task
from server.observability.traffic import KEPT, History, PaddedWork, Traffic


async def test_a_sample_has_the_work_of_its_interval_and_the_state_at_its_end() -> None:
    before = dataclasses.replace(
        Traffic(), output_tokens=100, prompt_tokens=7, decode=PaddedWork(30, 10)
    )
    now = Traffic(
        output_tokens=160,
        prompt_tokens=7,
        running=3,
        waiting=2,
        kv_cache_usage=0.51239,
        decode=PaddedWork(45, 15),
        prefill=PaddedWork(0, 0),
    )
    totals = iter([before, now])
    history = History(lambda: next(totals))
    await history.take()
    assert history.after(0) == [], "an interval needs its beginning"
    await asyncio.sleep(0.01)
    await history.take()
    (sample,) = history.after(0)
    assert (sample.output_tokens, sample.prompt_tokens) == (60, 0)
    assert (sample.running, sample.waiting, sample.kv_cache_usage) == (3, 2, 0.5124)
    assert (sample.decode_padding, sample.prefill_padding) == (0.25, None)
    assert sample.seconds >= 0.01


async def test_the_first_sample_has_what_ran_since_the_engine_was_there() -> None:
    first = dataclasses.replace(Traffic(), output_tokens=8)
    totals = iter([None, None, first])
    history = History(lambda: next(totals))
    for _ in range(3):
        await history.take()
    assert [sample.output_tokens for sample in history.after(0)] == [8]


async def test_the_latest_samples_are_kept_and_found_by_number() -> None:
    history = History(Traffic)
    for _ in range(KEPT + 4):
        await history.take()
    kept = [sample.number for sample in history.after(0)]
    assert kept == list(range(4, KEPT + 4))
    assert [sample.number for sample in history.after(KEPT + 1)] == [KEPT + 2, KEPT + 3]
    assert history.after(KEPT + 3) == []
    # The number of a longer process before this one.
    assert [sample.number for sample in history.after(9999)] == kept


async def test_a_reading_that_fails_leaves_out_one_sample() -> None:
    given = iter([0, 5, None, 12])

    def read() -> Traffic:
        tokens = next(given, 12)
        if tokens is None:
            raise FileNotFoundError("counter_9.db")
        return dataclasses.replace(Traffic(), output_tokens=tokens)

    history = History(read)
    async with background_task(history.follow(0.001)), asyncio.timeout(10):
        while len(history.after(0)) < 3:
            await asyncio.sleep(0.001)
    assert [sample.output_tokens for sample in history.after(0)][:3] == [5, 7, 0]
