"""Decode steps reach vLLM's loggers a little later, in order, and all before an end is seen."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from server.engine.outputs import DeferredStats, defer_stats

pytestmark = pytest.mark.engine


class Recorded:
    """One of vLLM's loggers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.gauges: list[int] = []
        """Steps whose statistics of the scheduler were recorded."""
        self.logged: list[int] = []

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any, engine_idx: int
    ) -> None:
        self.steps.append(iteration_stats and iteration_stats.iteration_timestamp)
        if scheduler_stats is not None:
            self.gauges.append(scheduler_stats.step_counter)

    def log(self) -> None:
        self.logged = list(self.steps)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def manager(recorded: Recorded) -> DeferredStats:
    made: Any = StatLoggerManager.__new__(StatLoggerManager)
    made.stat_loggers = [recorded]
    engine: Any = SimpleNamespace(logger_manager=made)
    defer_stats(engine)
    assert isinstance(made, DeferredStats)
    return made


def step(number: int, running: int = 2, **fields: Any) -> tuple[SchedulerStats, IterationStats]:
    iteration = IterationStats()
    iteration.iteration_timestamp = number
    iteration.num_generation_tokens = running
    for name, value in fields.items():
        setattr(iteration, name, value)
    return SchedulerStats(num_running_reqs=running, step_counter=number), iteration


async def test_decode_steps_are_recorded_together(
    manager: DeferredStats, recorded: Recorded
) -> None:
    for number in range(5):
        manager.record(*step(number))
    assert not recorded.steps
    await asyncio.sleep(0.5)
    assert recorded.steps == [0, 1, 2, 3, 4]
    assert recorded.gauges == [4]
    manager.record(*step(5))
    await asyncio.sleep(0.5)
    assert recorded.steps[-1] == 5


@pytest.mark.parametrize(
    "fields",
    [
        {"spec_decoding_stats": object()},
        {"kv_connector_stats": {}},
        {"kv_cache_eviction_events": [object()]},
        {"prefix_cache_stats": PrefixCacheStats(requests=1)},
    ],
)
async def test_what_is_counted_of_the_scheduler_is_recorded(
    manager: DeferredStats, recorded: Recorded, fields: dict[str, Any]
) -> None:
    for number in range(3):
        scheduler, iteration = step(number)
        manager.record(replace(scheduler, **(fields if number == 1 else {})), iteration)
    manager.flush()
    assert recorded.gauges == [1, 2]


async def test_each_engine_has_its_gauges(manager: DeferredStats, recorded: Recorded) -> None:
    for number, engine in enumerate((0, 0, 1, 1)):
        manager.record(*step(number), None, engine)
    manager.flush()
    assert recorded.gauges == [1, 3]


@pytest.mark.parametrize(
    "last",
    [
        {"finished_requests": [object()]},
        {"time_to_first_tokens_iter": [0.1]},
        {"num_preempted_reqs": 1},
        {"running": 0},
    ],
)
async def test_a_start_or_an_end_is_seen_at_once(
    manager: DeferredStats, recorded: Recorded, last: dict[str, Any]
) -> None:
    manager.record(*step(0))
    manager.record(*step(1, **last))
    assert recorded.steps == [0, 1]


async def test_a_step_without_statistics_of_tokens_is_seen_at_once(
    manager: DeferredStats, recorded: Recorded
) -> None:
    manager.record(step(0)[0], None)
    assert recorded.gauges == [0]


async def test_the_log_has_every_step(manager: DeferredStats, recorded: Recorded) -> None:
    manager.record(*step(0))
    manager.log()
    assert recorded.logged == [0]


async def test_many_steps_do_not_pile_up(manager: DeferredStats, recorded: Recorded) -> None:
    for number in range(100):
        manager.record(*step(number))
    assert len(recorded.steps) == 64


def test_an_engine_without_statistics_stays_as_it_is() -> None:
    engine: Any = SimpleNamespace(logger_manager=None)
    defer_stats(engine)
    assert engine.logger_manager is None
