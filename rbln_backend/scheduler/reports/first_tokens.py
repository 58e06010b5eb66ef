"""Times to first token, by length of the prompt."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping

from rbln_backend.reporting.metrics_board import MetricsBoard
from rbln_backend.scheduler.background import is_background
from rbln_backend.scheduler.constraints import needs_chunk
from rbln_backend.vllm_compat.surface import Request, SchedulerOutput

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
