"""A scheduler that brings a fault into the engine: the last kernel of decode steps fails at times.

The fault begins with the first request whose prompt begins with a token: from then on each third
decode step has logits with a flipped sign bit.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from rbln_backend.core import Phase
from rbln_backend.scheduler.scheduler import RblnScheduler
from rbln_backend.worker.runner import StepRunner

FAULTY = 78
_PERIOD = 3


class FaultyScheduler(RblnScheduler):
    def add_request(self, request: Request) -> None:
        if request.all_token_ids[0] == FAULTY:
            _break_decode_steps()
        super().add_request(request)


def _break_decode_steps() -> None:
    run, steps = StepRunner._run, itertools.count()

    def faulty_run(self: StepRunner, step: Any, batch: Any) -> tuple[Tensor, ...]:
        outputs = run(self, step, batch)
        decodes = step.spec.phase in (Phase.DECODE, Phase.VERIFY)
        if decodes and next(steps) % _PERIOD == 0:
            with torch.inference_mode():
                outputs[0].neg_()
                if outputs[-1].dtype == torch.int32:
                    # The device picks the tokens from the same logits.
                    outputs[-1].copy_(outputs[0].argmax(-1))
        return outputs

    StepRunner._run = faulty_run  # type: ignore[method-assign]


# ------------------------------------------------------------------------------- stalling scheduler
FORGOTTEN = 77


class StallingScheduler(RblnScheduler):
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        waiting = [r for r in self._waiting() if r.all_token_ids[0] == FORGOTTEN]
        with self._held_back(waiting):
            return super().schedule(throttle_prefills)
