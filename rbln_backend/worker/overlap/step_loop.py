"""The classes of an engine's step loop, with and without asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rbln_backend.vllm_compat.surface import VllmConfig
from rbln_backend.worker.model_runner import RblnModelRunner
from rbln_backend.worker.overlap.async_runner import AsyncModelRunner
from rbln_backend.worker.overlap.steps import (
    LaunchInThread,
    OverlappedStepRunner,
    launch_on_device,
)
from rbln_backend.worker.step.runner import StepRunner


class StepLoop(NamedTuple):
    """Makes the parts of a step loop, with the arguments of their base classes."""

    steps: Callable[..., StepRunner]
    runner: Callable[..., RblnModelRunner]


def step_loop(config: VllmConfig, *, runs_on_host: bool, replies: bool) -> StepLoop:
    """Return the classes for a rank on a device that ``runs_on_host`` or beside it.

    A rank that does not reply to the engine has nothing to do beside a step: it ends each step
    where it began, so that a failure ends its process instead of leaving the others waiting.
    """
    if not config.scheduler_config.async_scheduling or not replies:
        return StepLoop(StepRunner, RblnModelRunner)
    launch = LaunchInThread() if runs_on_host else launch_on_device
    return StepLoop(partial(OverlappedStepRunner, launch=launch), AsyncModelRunner)
