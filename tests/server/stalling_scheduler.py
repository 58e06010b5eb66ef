"""A scheduler with a defect: it forgets to run requests whose prompt begins with a token."""

from __future__ import annotations

from vllm.v1.core.sched.output import SchedulerOutput

from rbln_backend.scheduler.scheduler import RblnScheduler

FORGOTTEN = 77


class StallingScheduler(RblnScheduler):
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        waiting = [r for r in self._waiting() if r.all_token_ids[0] == FORGOTTEN]
        with self._held_back(waiting):
            return super().schedule(throttle_prefills)
