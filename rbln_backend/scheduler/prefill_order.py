"""Order of prompts: the one with the fewest tokens left first, with aging.

A prompt of ``n`` tokens is *aged* once prefill steps have computed ``AGING * n`` tokens since its
arrival. Aged prompts come before all others of their priority, in order of arrival. So later
prompts delay a prompt of ``n`` tokens by at most ``AGING * n`` tokens, rounded up to a chunk.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from rbln_backend.reporting.metrics_board import MetricsBoard
from rbln_backend.scheduler.background import is_background
from rbln_backend.scheduler.constraints import AGING
from rbln_backend.scheduler.priority_first import is_priority
from rbln_backend.vllm_compat.surface import Request

Key = tuple[int, bool, int, int]
"""Priority, whether the prompt is not aged, tokens left (0 if aged), number of the arrival."""


@dataclass(slots=True)
class _Arrival:
    number: int
    due: int
    """Computed prompt tokens at which the prompt is aged."""
    entry: int | None = None
    """Number of its valid entry in the heap of waiting prompts; None once it was admitted."""
    overtaken_at: float | None = None
    """Time of the first chunk of a later prompt since this prompt's latest chunk."""


class PrefillOrder:
    """Order of the chunks of unread prompts of the foreground."""

    def __init__(
        self,
        hit: Callable[[Request], int],
        board: MetricsBoard,
        *,
        by_priority: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``hit`` returns the tokens of a waiting request's prefix hit.

        ``by_priority``: vLLM's policy is "priority", so that smaller priorities come first.
        """
        self._overtakes = board.counter("rbln_prefill_overtaken_total")
        self._delay = board.histogram("rbln_prefill_overtaken_seconds")
        self._hit, self._clock = hit, clock
        self._by_priority = by_priority
        self._computed = 0
        self._numbers: Iterator[int] = count()
        self._entries: Iterator[int] = count()
        self._arrivals: dict[str, _Arrival] = {}
        self._waiting: list[tuple[Key, int, Request]] = []
        self._young: list[tuple[int, int, Request]] = []

    def add(self, request: Request) -> None:
        """Add a waiting request: a new one, or one that was preempted."""
        if is_background(request):
            return
        left = request.num_tokens - self._hit(request)
        arrival = self._arrivals.get(request.request_id)
        if arrival is None:
            arrival = _Arrival(next(self._numbers), self._computed + AGING * left)
            self._arrivals[request.request_id] = arrival
            heapq.heappush(self._young, (arrival.due, arrival.number, request))
        self._queue(request, arrival, left)

    def ended(self, request_id: str) -> None:
        """Drop a request that ended."""
        self._arrivals.pop(request_id, None)
        if not self._arrivals:
            # What is left in the heaps belongs to requests that ended.
            self._waiting.clear()
            self._young.clear()

    def computed(self, step: Sequence[Request], tokens: int, unread: Iterable[Request]) -> None:
        """Count a prefill step of ``tokens`` tokens, the requests of which are ``step``.

        ``unread`` prompts that arrived before one of them were overtaken. Waiting prompts that are
        aged from now on move to the front.
        """
        now = self._clock()
        arrivals = [self._arrivals[request.request_id] for request in step]
        latest = max(arrival.number for arrival in arrivals)
        for request in unread:
            arrival = self._arrivals[request.request_id]
            if arrival.number < latest and request not in step and arrival.overtaken_at is None:
                arrival.overtaken_at = now
                self._overtakes.inc()
        for arrival in arrivals:
            arrival.entry = None
            if arrival.overtaken_at is not None:
                self._delay.observe(now - arrival.overtaken_at)
                arrival.overtaken_at = None
        self._computed += tokens
        self._move_aged()

    def first(
        self, running: Iterable[Request], most: int, can_begin: Callable[[Request], bool]
    ) -> list[Request]:
        """Return unread prompts in order: all ``running`` ones and up to ``most`` waiting ones.

        ``can_begin`` returns whether a waiting request can be admitted.
        """
        keys = [(self._key(r, r.num_tokens - r.num_computed_tokens), r) for r in running]
        seen: list[tuple[Key, int, Request]] = []
        while self._waiting and most > 0:
            entry = _, number, request = heapq.heappop(self._waiting)
            arrival = self._arrivals.get(request.request_id)
            if arrival is None or arrival.entry != number:
                continue
            seen.append(entry)
            if can_begin(request):
                most -= 1
                keys.append((self._key(request, request.num_tokens - self._hit(request)), request))
        for entry in seen:
            heapq.heappush(self._waiting, entry)
        return [request for _, request in sorted(keys, key=lambda pair: pair[0])]

    def _move_aged(self) -> None:
        while self._young and self._young[0][0] <= self._computed:
            *_, request = heapq.heappop(self._young)
            arrival = self._arrivals.get(request.request_id)
            if arrival is not None and arrival.entry is not None:
                self._queue(request, arrival, 0)

    def _queue(self, request: Request, arrival: _Arrival, left: int) -> None:
        arrival.entry = next(self._entries)
        heapq.heappush(self._waiting, (self._key(request, left), arrival.entry, request))

    def _key(self, request: Request, left: int) -> Key:
        arrival = self._arrivals[request.request_id]
        ranks = self._by_priority or is_priority(request)
        is_aged = arrival.due <= self._computed
        priority = request.priority if ranks else 0
        return priority, not is_aged, 0 if is_aged else left, arrival.number
