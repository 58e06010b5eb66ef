"""Reports about prompts: times to first token, and the progress of long ones for their streams.

Only requests with ``PROGRESS_ARGS`` among their ``extra_args`` report progress, after each prefill
step but the last: the first token follows that one. A report is an output without tokens, with
``PROMPT_PROGRESS`` as its stop reason.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request

from rbln_backend.config import PROGRESS_ARGS, PROMPT_PROGRESS
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.priorities import is_background
from rbln_backend.scheduler.steps import needs_chunk

_LIMITS = (256, 2048, 16384)
_CLASSES = (*(f"to_{limit}" for limit in _LIMITS), "more")


class PromptReports:
    """Observes ``rbln_first_token_seconds`` of the foreground, and reports progress."""

    def __init__(self, board: MetricsBoard) -> None:
        self._seconds = [
            board.histogram("rbln_first_token_seconds", prompt=name) for name in _CLASSES
        ]
        self.expected: dict[str, Request] = {}
        """Requests whose first token a step under way samples, or the step after it."""
        self._began: WeakKeyDictionary[Request, float] = WeakKeyDictionary()
        # The dictionary of a step identifies it: other steps may be scheduled before it has run.
        self.steps: dict[int, tuple[dict[str, int], list[tuple[Request, int]]]] = {}
        """The tokens of steps, and requests with their computed tokens."""

    def scheduled(self, prefill: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Note the requests of a ``prefill`` step."""
        tokens, reported = prefill.num_scheduled_tokens, list[tuple[Request, int]]()
        for request_id in tokens:
            request = requests[request_id]
            if not needs_chunk(request):
                if not (request.num_output_tokens or is_background(request)):
                    self.expected[request_id] = request
                continue
            params = request.sampling_params
            if params is None or not params.extra_args or request.num_output_tokens:
                continue
            if params.extra_args.get(PROGRESS_ARGS):
                reported.append((request, request.num_computed_tokens))
                self._began.setdefault(request, time.monotonic())
        if reported:
            self.steps[id(tokens)] = tokens, reported

    def report(self, ran: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Report after a step; progress goes to the front of its ``outputs``."""
        now = time.time()
        for request_id, request in list(self.expected.items()):
            if request.num_output_tokens:
                length_class = bisect_left(_LIMITS, request.num_prompt_tokens)
                self._seconds[length_class].observe(now - request.arrival_time)
            if request.num_output_tokens or request.is_finished():
                del self.expected[request_id]
        _, reported = self.steps.pop(id(ran.num_scheduled_tokens), (None, ()))
        for request, computed in reported:
            if request.is_finished():
                continue
            stats = request.prefill_stats
            progress = {
                "processed": computed,
                "total": request.num_tokens,
                "cache": 0 if stats is None else stats.num_cached_tokens,
                "time_ms": round((time.monotonic() - self._began[request]) * 1000),
            }
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                stop_reason=PROMPT_PROGRESS,
                # The one field of vLLM's output that takes any mapping.
                kv_transfer_params=progress,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            outputs[request.client_index].outputs.insert(0, output)
