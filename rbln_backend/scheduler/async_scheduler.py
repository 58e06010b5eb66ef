"""The scheduler of an engine that plans a step while the device runs the one before."""

from __future__ import annotations

from rbln_backend.scheduler.scheduler import RblnScheduler
from rbln_backend.vllm_compat.surface import AsyncScheduler


class RblnAsyncScheduler(RblnScheduler, AsyncScheduler):
    """``RblnScheduler`` over vLLM's placeholders for tokens of a step that has not ended.

    A request has one token more than is known, so that its next step can be planned. A stop is
    found one step late: vLLM drops the token of that step.
    """
