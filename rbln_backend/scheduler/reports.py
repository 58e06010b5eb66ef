"""Reports about prompts: times to first token, and the progress of long ones for their streams.

Only requests with ``PROGRESS_ARGS`` among their ``extra_args`` report progress, after each prefill
step but the last: the first token follows that one. A report is an output without tokens, with
``PROMPT_PROGRESS`` as its stop reason.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from rbln_backend.config import PROGRESS_ARGS, PROMPT_PROGRESS
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.priorities import is_background
from rbln_backend.scheduler.steps import needs_chunk
from rbln_backend.vllm_compat.surface import (
    EngineCoreOutput,
    EngineCoreOutputs,
    Request,
    SchedulerOutput,
)

_LIMITS = (256, 2048, 16384)
_CLASSES = (*(f"to_{limit}" for limit in _LIMITS), "more")


class FirstTokens:
    """Observes ``rbln_first_token_seconds`` for requests of the foreground."""

    def __init__(self, board: MetricsBoard) -> None:
        self._seconds = [
            board.histogram("rbln_first_token_seconds", prompt=name) for name in _CLASSES
        ]
        self._expected: dict[str, Request] = {}

    def scheduled(self, prefill: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Note the requests whose first token a ``prefill`` step samples, or the step after it."""
        for request_id in prefill.num_scheduled_tokens:
            request = requests[request_id]
            if not (needs_chunk(request) or request.num_output_tokens or is_background(request)):
                self._expected[request_id] = request

    def report(self) -> None:
        """Observe the noted requests that have a token; call it after each step."""
        if not self._expected:
            return
        now = time.time()
        for request_id, request in list(self._expected.items()):
            if request.num_output_tokens:
                place = bisect_left(_LIMITS, request.num_prompt_tokens)
                self._seconds[place].observe(now - request.arrival_time)
            if request.num_output_tokens or request.is_finished():
                del self._expected[request_id]


_Computed = dict[str, int]
"""Tokens of a step by request id."""


class ProgressReports:
    """Reports of the prefill steps that were scheduled and have not run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is in seconds."""
        self._clock = clock
        self._began: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        # The dictionary of a step identifies it: other steps may be scheduled before it has run.
        self._steps: dict[int, tuple[_Computed, list[tuple[Request, int]]]] = {}

    def scheduled(self, prefill: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Note the requests of a ``prefill`` step whose prompts are not read to their ends."""
        tokens = prefill.num_scheduled_tokens
        reported = [request for request in map(requests.__getitem__, tokens) if _is_wanted(request)]
        if reported:
            self._steps[id(tokens)] = tokens, [(r, r.num_computed_tokens) for r in reported]
        for request in reported:
            self._began.setdefault(request, self._clock())

    def report(self, ran: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Insert the reports of a step at the front of its outputs; call it after each step."""
        if not self._steps:
            return
        _, reported = self._steps.pop(id(ran.num_scheduled_tokens), (None, ()))
        for request, computed in reported:
            if not request.is_finished():
                output = self._output(request, computed)
                outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
                outputs[request.client_index].outputs.insert(0, output)

    def _output(self, request: Request, computed: int) -> EngineCoreOutput:
        stats = request.prefill_stats
        progress = {
            "processed": computed,
            "total": request.num_tokens,
            "cache": 0 if stats is None else stats.num_cached_tokens,
            "time_ms": round((self._clock() - self._began[request]) * 1000),
        }
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            stop_reason=PROMPT_PROGRESS,
            # The one field of vLLM's output that takes any mapping.
            kv_transfer_params=progress,
        )


def _is_wanted(request: Request) -> bool:
    params = request.sampling_params
    if params is None or not params.extra_args or request.num_output_tokens:
        return False
    return bool(params.extra_args.get(PROGRESS_ARGS)) and needs_chunk(request)


class PromptReports:
    """Calls ``FirstTokens`` and ``ProgressReports``."""

    def __init__(self, board: MetricsBoard) -> None:
        self._first_tokens = FirstTokens(board)
        self._progress = ProgressReports()

    def scheduled(self, prefill: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Note the requests of a ``prefill`` step."""
        self._first_tokens.scheduled(prefill, requests)
        self._progress.scheduled(prefill, requests)

    def report(self, ran: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Report after each step, which may add to its ``outputs``."""
        self._first_tokens.report()
        self._progress.report(ran, outputs)
