"""Weighted fair queueing of prompts between API keys.

Start-time fair queueing over the tokens that were computed for each key, divided by its weight: the
next prompt is one of the key with the least. A key without waiting prompts saves nothing up: when
its next prompt arrives, it starts at the value of the key that was served last. Every other rule of
the order of prompts applies within a key. Answers are charged at their ends, as their lengths are
not known before; background requests use spare capacity, and are not charged.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rbln_backend.scheduler.background import is_background
from rbln_backend.scheduler.fairness.key_share import KeyShare
from rbln_backend.scheduler.prefill_order import PrefillOrder
from rbln_backend.vllm_compat.surface import Request

OUTPUT_COST = 2
"""Prompt tokens that a token of an answer counts as: the ratio of Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024)."""


@dataclass(slots=True, eq=False)
class _KeyQueue:
    """Prompts of one key; ``served`` are its computed tokens over its weight."""

    order: PrefillOrder | None
    weight: float
    served: float = 0.0
    waiting: set[str] = field(default_factory=set)
    """Ids of requests whose prompts have not begun."""


class FairPrompts:
    """Order of unread prompts of the foreground: fair between keys, then the order of each key."""

    def __init__(self, make_order: Callable[[], PrefillOrder] | None) -> None:
        """``make_order`` returns an empty order for one key; None for ``prefill_policy="fcfs"``."""
        self._make_order = make_order
        self._queues: dict[int, _KeyQueue] = {}
        self._queue_of: dict[str, _KeyQueue] = {}
        self._start = 0.0
        """``served`` of the key that was served last, before that step."""

    def add(self, request: Request) -> None:
        """Add a waiting request: a new one, or one that was preempted."""
        if is_background(request):
            return
        share = _share_of(request)
        queue = self._queues.get(share.number)
        if queue is None:
            order = None if self._make_order is None else self._make_order()
            queue = self._queues[share.number] = _KeyQueue(order, share.weight)
        queue.weight = share.weight
        if not queue.waiting:
            queue.served = max(queue.served, self._start)
        queue.waiting.add(request.request_id)
        self._queue_of[request.request_id] = queue
        if queue.order is not None:
            queue.order.add(request)

    def ended(self, request: Request) -> None:
        """Drop a request that ended, and charge its answer."""
        queue = self._queue_of.pop(request.request_id, None)
        if queue is None:
            return
        queue.waiting.discard(request.request_id)
        queue.served += OUTPUT_COST * request.num_output_tokens / queue.weight
        if queue.order is not None:
            queue.order.ended(request.request_id)
        if not self._queue_of:
            self._queues.clear()
            self._start = 0.0

    def computed(self, step: Sequence[tuple[Request, int]], unread: Iterable[Request]) -> None:
        """Charge a prefill step of foreground requests, each with its number of computed tokens.

        ``unread`` are the foreground prompts that were not in it, or are not read to their ends.
        """
        in_step: dict[_KeyQueue, list[tuple[Request, int]]] = {}
        for request, tokens in step:
            in_step.setdefault(self._queue_of[request.request_id], []).append((request, tokens))
        self._start = min(queue.served for queue in in_step)
        unread = list(unread)
        for queue, requests in in_step.items():
            tokens = sum(number for _, number in requests)
            queue.served += tokens / queue.weight
            queue.waiting.difference_update(request.request_id for request, _ in requests)
            if queue.order is not None:
                left = [r for r in unread if self._queue_of[r.request_id] is queue]
                queue.order.computed([request for request, _ in requests], tokens, left)

    def first(
        self, running: Iterable[Request], most: int, can_begin: Callable[[Request], bool]
    ) -> list[Request]:
        """Return unread prompts in order: all ``running`` ones and up to ``most`` waiting ones.

        ``can_begin`` returns whether a waiting request can be admitted. Not for "fcfs".
        """
        partial: dict[_KeyQueue, list[Request]] = {}
        for request in running:
            partial.setdefault(self._queue_of[request.request_id], []).append(request)
        queues = [q for q in self._queues.values() if q.waiting or q in partial]
        lists = {q: _order(q).first(partial.get(q, ()), most, can_begin) for q in queues}
        if len(lists) == 1:
            return next(iter(lists.values()))
        chosen = []
        for request in _interleaved(lists):
            if request.request_id in self._queue_of[request.request_id].waiting:
                most -= 1
                if most < 0:
                    continue
            chosen.append(request)
        return chosen

    def behind_first_key(
        self, waiting: Iterable[Request], can_begin: Callable[[Request], bool]
    ) -> list[Request]:
        """Return the requests of ``waiting`` whose keys have been served more than another one.

        A key of which no request ``can_begin`` delays no other; background requests are not judged.
        """
        by_key: dict[_KeyQueue, list[Request]] = {}
        for request in waiting:
            if not is_background(request):
                by_key.setdefault(self._queue_of[request.request_id], []).append(request)
        if len(by_key) < 2:
            return []
        for queue in sorted(by_key, key=lambda queue: queue.served):
            if any(map(can_begin, by_key[queue])):
                return [r for q, requests in by_key.items() if q is not queue for r in requests]
        return []


def _share_of(request: Request) -> KeyShare:
    if request.sampling_params is not None:
        return KeyShare.of(request.sampling_params.extra_args)
    return KeyShare.of(
        None if request.pooling_params is None else request.pooling_params.extra_kwargs
    )


def _order(queue: _KeyQueue) -> PrefillOrder:
    assert queue.order is not None, "prompts are served as they come"
    return queue.order


def _interleaved(lists: dict[_KeyQueue, list[Request]]) -> Iterable[Request]:
    """Yield the requests of all keys in the order in which they would be served."""
    heap = [(queue.served, number, 0) for number, queue in enumerate(lists)]
    queues, requests = list(lists), list(lists.values())
    heapq.heapify(heap)
    while heap:
        served, number, position = heapq.heappop(heap)
        if position == len(requests[number]):
            continue
        request = requests[number][position]
        yield request
        left = request.num_tokens - request.num_computed_tokens
        heapq.heappush(heap, (served + left / queues[number].weight, number, position + 1))
