"""Which request comes first: priorities, background requests in spare rows, the order of prompts.

A decode graph of bucket B computes B rows whatever is in them. While n requests of the foreground
decode, the background uses the other B - n rows of their bucket: first for its decoding requests,
oldest first, then for prompts, one token per row and step (decode prefill). The other background
requests are *parked*: hidden from the step, with their KV blocks. The newest are preempted only
where the foreground lacks capacity.

The prompt with the fewest tokens left is read first. A prompt of ``n`` tokens is *aged* once
prefill steps have computed ``AGING * n`` tokens since its arrival. Aged prompts come before all
others of their priority, in order of arrival. So later prompts delay a prompt of ``n`` tokens by at
most ``AGING * n`` tokens, rounded up to a chunk.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count

from vllm.v1.request import Request, RequestStatus

from rbln_backend.buckets import BucketTable
from rbln_backend.config import BACKGROUND_PRIORITY, FIRST_PRIORITY
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.steps import AGING, can_decode, decode_share, needs_chunk

_CAN_BEGIN = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def behind_priority(waiting: Iterable[Request]) -> list[Request]:
    """Return the requests of ``waiting`` that a step must not admit before priority requests.

    Empty where no priority request can begin. A priority request whose grammar is still being
    compiled delays no other request.
    """
    requests = list(waiting)
    if not any(is_priority(request) and request.status in _CAN_BEGIN for request in requests):
        return []
    return [request for request in requests if not is_priority(request)]


def is_priority(request: Request) -> bool:
    return request.priority <= FIRST_PRIORITY


STEPS_PER_CHUNK = 128
"""Foreground steps between two chunks of background prompts."""

LEAST_LEFT = 32
"""Fewest missing prompt tokens that get such a chunk; decode prefill is as fast for fewer."""


def is_background(request: Request) -> bool:
    return request.priority >= BACKGROUND_PRIORITY


def can_decode_prefill(request: Request) -> bool:
    """Return whether decode rows can compute its prompt; they give no prompt logprobs."""
    params = request.sampling_params
    return params is not None and params.prompt_logprobs is None


def comes_seldom(request: Request, others: Sequence[Request]) -> bool:
    """Return whether ``request`` gets few chunks: they would delay streams among ``others``."""
    return is_background(request) and not all(map(is_background, others))


def background_last(requests: Sequence[Request], before: Sequence[Request]) -> list[Request]:
    """Sort ``requests`` as in ``before``, then new requests; background requests come last."""
    places = {id(request): place for place, request in enumerate(before)}
    new = len(places)
    return sorted(requests, key=lambda r: (is_background(r), places.get(id(r), new)))


@dataclass(slots=True)
class Rows:
    """Running requests, divided for one decode step."""

    decoding: list[Request] = field(default_factory=list)
    """Foreground requests first."""
    decode_prefill: list[Request] = field(default_factory=list)
    """Requests that compute one token of their prompt in a row."""
    hidden: list[Request] = field(default_factory=list)
    spare: int = 0
    """Rows that are still padding."""

    @property
    def visible(self) -> list[Request]:
        return self.decoding + self.decode_prefill if self.decode_prefill else self.decoding

    def without(self, names: Set[str]) -> Rows:
        """Return these rows with the requests of ``names`` hidden."""
        hidden = [r for r in (*self.decoding, *self.decode_prefill) if r.request_id in names]
        return Rows(
            [request for request in self.decoding if request not in hidden],
            [request for request in self.decode_prefill if request not in hidden],
            [*self.hidden, *hidden],
            self.spare,
        )


class Background:
    """Divides rows and chunks between the background and the foreground."""

    def __init__(
        self, buckets: BucketTable | None, max_num_seqs: int, stages: int, board: MetricsBoard
    ) -> None:
        """``buckets``: decode buckets; None for a pooling model, whose steps have one row.

        Each of a pipeline's ``stages`` runs one decode step at the same time.
        """
        self._buckets = buckets
        self._max_num_seqs, self._stages = max_num_seqs, stages
        self._ids: set[str] = set()
        self._steps_beside = 0
        self._rows = {
            kind: board.counter("rbln_background_rows_total", kind=kind)
            for kind in ("padding", "alone", "prompt")
        }
        self._parked = board.gauge("rbln_background_parked")
        self._parked.set(0)
        self._preempted = board.counter("rbln_background_preemptions_total")

    def add(self, request: Request) -> None:
        if is_background(request):
            self._ids.add(request.request_id)

    def is_there(self, requests: Mapping[str, Request]) -> bool:
        """Return whether any of ``requests``, all unfinished ones, is a background request."""
        if self._ids:
            self._ids &= requests.keys()
            if not self._ids:
                self._parked.set(0)
        return bool(self._ids)

    def may_prefill(self, unread: Iterable[Request], *, beside: bool, prompts: bool) -> bool:
        """Return whether this step may be a chunk of a background prompt of ``unread``.

        False while ``prompts`` of the foreground wait. With the foreground running ``beside``, a
        chunk delays one token of each of its streams. So at most every 129th step is one, which
        keeps the 99th percentile, and only for prompts of ``LEAST_LEFT`` missing tokens or more.
        """
        if prompts:
            return False
        self._steps_beside = self._steps_beside + 1 if beside else 0
        if beside:
            if self._steps_beside <= STEPS_PER_CHUNK:
                return False
            for request in unread:
                left = request.num_tokens - request.num_computed_tokens
                if left >= LEAST_LEFT or not can_decode_prefill(request):
                    break
            else:
                return False
        self._steps_beside = 0
        return True

    def rows(self, running: Sequence[Request]) -> Rows:
        """Divide ``running`` into the rows of a decode step and hidden requests."""
        rows, back, unread = Rows(), list[Request](), list[Request]()
        for request in running:
            if not is_background(request):
                (rows.hidden if needs_chunk(request) else rows.decoding).append(request)
            else:
                (unread if needs_chunk(request) else back).append(request)
        beside = bool(rows.decoding)
        spare_capacity = len(back)
        if beside:
            # The padding rows of steps over all pipeline stages.
            spare_capacity = 0
            if self._buckets is not None:
                share = decode_share(len(rows.decoding), self._max_num_seqs, self._stages)
                spare_capacity = self._buckets.find(share) * self._stages - len(rows.decoding)
        run, parked = back[:spare_capacity], back[spare_capacity:]
        if any(map(can_decode, rows.decoding)):
            free = spare_capacity - len(run)
            rows.decode_prefill = [r for r in unread if can_decode_prefill(r)][:free]
            rows.spare = free - len(rows.decode_prefill)
        rows.decoding += run
        rows.hidden += parked + [r for r in unread if r not in rows.decode_prefill]
        self._rows["padding" if beside else "alone"].inc(len(run))
        self._rows["prompt"].inc(len(rows.decode_prefill))
        self._parked.set(sum(map(is_background, rows.hidden)))
        return rows

    def began(self) -> None:
        self._rows["prompt"].inc()

    def preempted(self) -> None:
        self._preempted.inc()


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
        while self._young and self._young[0][0] <= self._computed:
            *_, request = heapq.heappop(self._young)
            waiting = self._arrivals.get(request.request_id)
            if waiting is not None and waiting.entry is not None:
                self._queue(request, waiting, 0)

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

    def _queue(self, request: Request, arrival: _Arrival, left: int) -> None:
        arrival.entry = next(self._entries)
        heapq.heappush(self._waiting, (self._key(request, left), arrival.entry, request))

    def _key(self, request: Request, left: int) -> Key:
        arrival = self._arrivals[request.request_id]
        ranks = self._by_priority or is_priority(request)
        is_aged = arrival.due <= self._computed
        priority = request.priority if ranks else 0
        return priority, not is_aged, 0 if is_aged else left, arrival.number
