"""Expiry of requests that waited too long for their first step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from rbln_backend.config import QUEUE_TIMEOUT
from rbln_backend.vllm_compat.surface import (
    EngineCoreOutput,
    EngineCoreOutputs,
    Request,
    RequestStatus,
)


class QueueExpiry:
    """Queue of deadlines, from which a step takes the expired request ids.

    All requests have the same limit, so that deadlines are in order of arrival and a step checks
    only the first. The scheduler decides if an expired request is still waiting.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``limit_s``: seconds that a request may wait; 0 disables the limit."""
        self._limit_s = limit_s
        self._clock = clock
        self._due: deque[tuple[float, str]] = deque()

    def add(self, request_id: str, waited_s: float) -> None:
        """Add a request that arrived ``waited_s`` seconds ago, measured on another clock."""
        if self._limit_s:
            waited_s = min(max(waited_s, 0.0), self._limit_s)
            self._due.append((self._clock() + self._limit_s - waited_s, request_id))

    def take_due(self) -> Iterator[str]:
        """Yield each request id once, after its deadline."""
        if not self._due:
            return
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            yield self._due.popleft()[1]


def never_scheduled(request: Request | None) -> bool:
    """Return whether ``request`` exists and waits for its first step."""
    return request is not None and request.status in (
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    )


def report_expired(requests: list[Request], outputs: dict[int, EngineCoreOutputs]) -> None:
    """Move the ends of ``requests`` to the front of a step's outputs, where vLLM reads them."""
    for request in requests:
        end = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=QUEUE_TIMEOUT,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        step = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        step.outputs.insert(0, end)
    requests.clear()
