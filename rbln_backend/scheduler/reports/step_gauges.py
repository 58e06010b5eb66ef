"""State of the scheduler for the main process, where several processes are clients of an engine.

vLLM sends the statistics of a step to one client. Counters of all clients are summed, but a gauge
is a value of the engine: one process has to know the last one.
"""

from __future__ import annotations

import time

from rbln_backend.vllm_compat.surface import EngineCoreOutputs, SchedulerStats

_MAIN = 0
"""Index of the client that publishes gauges."""
_PERIOD_S = 0.25


class StepGauges:
    """Sends the numbers of requests and the cache's usage to the main process after changes.

    While the numbers of requests stay the same, the usage is sent every 0.25 seconds.
    """

    def __init__(self) -> None:
        self._sent: tuple[int, int, int] | None = None
        self._due = 0.0

    def report(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the gauges of a step to ``outputs``, by client, if another client has its statistics.

        The copy has no counters, which would be counted twice.
        """
        stats = next((o.scheduler_stats for o in outputs.values() if o.scheduler_stats), None)
        if stats is None:
            return
        state = (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs)
        now = time.monotonic()
        main = outputs.get(_MAIN)
        if main is None or main.scheduler_stats is None:
            if state == self._sent and now < self._due:
                return
            main = outputs.setdefault(_MAIN, EngineCoreOutputs())
            running, waiting, skipped = state
            main.scheduler_stats = SchedulerStats(
                num_running_reqs=running,
                num_waiting_reqs=waiting,
                num_skipped_waiting_reqs=skipped,
                kv_cache_usage=stats.kv_cache_usage,
            )
        self._sent, self._due = state, now + _PERIOD_S
