"""When a request has waited too long for its first turn."""

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
    """Remembers when each request came and names those whose time to be scheduled is over.

    All requests may wait equally long, so that they are due in the order in which they came: a
    step looks at one of them. Whether one still waits is the scheduler's to know.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``limit_s``: seconds that a request may wait; 0 is any time."""
        self._limit_s = limit_s
        self._clock = clock
        self._due: deque[tuple[float, str]] = deque()

    def add(self, request_id: str, waited_s: float) -> None:
        """Note a request that has come ``waited_s`` seconds ago, on another clock."""
        if self._limit_s:
            waited_s = min(max(waited_s, 0.0), self._limit_s)
            self._due.append((self._clock() + self._limit_s - waited_s, request_id))

    def take_due(self) -> Iterator[str]:
        """Name each request once, when its time is over."""
        if not self._due:
            return
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            yield self._due.popleft()[1]


def never_scheduled(request: Request | None) -> bool:
    """Whether a request, if it is still there, waits for its first turn."""
    return request is not None and request.status in (
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    )


def report_expired(requests: list[Request], outputs: dict[int, EngineCoreOutputs]) -> None:
    """Add the ends of ``requests`` to a step's outputs, in front: there the front end looks."""
    for request in requests:
        end = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=QUEUE_TIMEOUT,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.insert(
            0, end
        )
