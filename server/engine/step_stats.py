"""Statistics of decode steps, recorded several steps at once.

The graph evicts the metrics' objects from the processor's caches, so that recording a step on its
own costs several times what it costs among others: 13 % of the HTTP process's time at one stream.
Half of vLLM's calls for such a step set gauges of the scheduler, which only the last of several
steps needs to set.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerManager

from server.vllm.patches import use_stat_loggers

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

_DELAY_S = 0.25
_MAX_STEPS = 64


class DeferredStats(StatLoggerManager):
    """vLLM's loggers of steps, which get decode steps at most 0.25 seconds late.

    Steps in which a request starts or ends are recorded at once, after all earlier ones, so that
    the metrics of an answer are complete when it is.
    """

    pending: list[tuple[Any, ...]]
    timer: asyncio.TimerHandle | None

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        """Record a step, or keep it for later."""
        self.pending.append((scheduler_stats, iteration_stats, mm_cache_stats, engine_idx))
        if not _is_decode(scheduler_stats, iteration_stats) or len(self.pending) >= _MAX_STEPS:
            self.flush()
        elif self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def flush(self) -> None:
        """Record the steps that were kept."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        pending, self.pending = self.pending, []
        for number, (scheduler, iteration, cache, engine) in enumerate(pending, 1):
            following = pending[number] if number < len(pending) else (None,)
            is_last = following[0] is None or following[-1] != engine
            if not is_last and _has_only_gauges(scheduler):
                scheduler = None
            super().record(scheduler, iteration, cache, engine)

    def log(self) -> None:
        """Log all steps."""
        self.flush()
        super().log()  # type: ignore[no-untyped-call]


def _is_decode(
    scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None
) -> bool:
    """Return whether running requests got tokens in a step, and nothing else happened."""
    return bool(
        scheduler_stats is not None
        and iteration_stats is not None
        and scheduler_stats.num_running_reqs
        and iteration_stats.num_generation_tokens
        and not iteration_stats.finished_requests
        and not iteration_stats.time_to_first_tokens_iter
        and not iteration_stats.num_preempted_reqs
    )


def _has_only_gauges(stats: SchedulerStats | None) -> bool:
    """Return whether the statistics of a later step replace all of these."""
    return (
        stats is not None
        and not stats.prefix_cache_stats.reset
        and not stats.prefix_cache_stats.requests
        and not stats.prefix_cache_stats.preempted_requests
        and not stats.kv_cache_eviction_events
        and stats.connector_prefix_cache_stats is None
        and stats.spec_decoding_stats is None
        and stats.kv_connector_stats is None
        and stats.iteration_details is None
        and stats.cudagraph_stats is None
        and stats.perf_stats is None
    )


def defer_stats(engine: AsyncLLM) -> None:
    """Make a new engine's loggers keep decode steps for later; without statistics do nothing."""
    manager = use_stat_loggers(engine, DeferredStats)
    if manager is not None:
        manager.pending, manager.timer = [], None
