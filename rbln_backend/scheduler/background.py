"""Requests that take what others leave: rows that would be padding, and steps without work.

A decode graph of bucket B computes B rows whatever is in them. While n requests of the foreground
decode, the first B - n of the background go along in the bucket of n; the others are *parked*:
hidden from the step, with their KV blocks. They lose those, the newest first, only where the
foreground needs room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.config import BACKGROUND_PRIORITY
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.vllm_compat.surface import Request

STEPS_PER_CHUNK = 128
"""Steps of the foreground between two chunks of the background's prompts."""


def is_background(request: Request) -> bool:
    """Whether a request takes what others leave."""
    return request.priority >= BACKGROUND_PRIORITY


def comes_seldom(request: Request, others: Sequence[Request]) -> bool:
    """Whether ``request`` has to wait for a chunk, because streams among ``others`` would."""
    return is_background(request) and not all(map(is_background, others))


def background_last(requests: Sequence[Request], before: Sequence[Request]) -> list[Request]:
    """``requests`` in the order that they had ``before``, new ones behind, the background last."""
    places = {id(request): place for place, request in enumerate(before)}
    new = len(places)
    return sorted(requests, key=lambda r: (is_background(r), places.get(id(r), new)))


class Background:
    """Knows whether there is any, and which rows it may have."""

    def __init__(self, buckets: BucketTable | None, board: MetricsBoard) -> None:
        """``buckets``: of decode steps; None for a model that pools, whose steps have one row."""
        self._buckets = buckets
        self._ids: set[str] = set()
        self._steps_beside = 0
        self._rows = {
            kind: board.counter("rbln_background_rows_total", kind=kind)
            for kind in ("padding", "alone")
        }
        self._parked = board.gauge("rbln_background_parked")
        self._parked.set(0)
        self._preempted = board.counter("rbln_background_preemptions_total")

    def add(self, request: Request) -> None:
        """Note a new request."""
        if is_background(request):
            self._ids.add(request.request_id)

    def is_there(self, requests: Mapping[str, Request]) -> bool:
        """Whether any of ``requests``, all that live, belongs to the background."""
        if self._ids:
            self._ids &= requests.keys()
            if not self._ids:
                self._parked.set(0)
        return bool(self._ids)

    def may_prefill(self, *, beside: bool, prompts: bool) -> bool:
        """Whether this step may be a chunk of its prompts.

        Never while ``prompts`` of the foreground wait. Where that runs ``beside``, a chunk holds up
        a token of each of its streams: so few of them that a 99th percentile stays.
        """
        if prompts:
            return False
        self._steps_beside = self._steps_beside + 1 if beside else 0
        if beside and self._steps_beside <= STEPS_PER_CHUNK:
            return False
        self._steps_beside = 0
        return True

    def rows(self, decoding: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Those of ``decoding`` that this step runs, the foreground first, and the parked ones."""
        front = [request for request in decoding if not is_background(request)]
        back = [request for request in decoding if is_background(request)]
        room = len(back)
        if front and self._buckets is not None:
            room = self._buckets.find(len(front)) - len(front)
        run, parked = back[:room], back[room:]
        self._rows["padding" if front else "alone"].inc(len(run))
        self._parked.set(len(parked))
        return front + run, parked

    def preempted(self) -> None:
        """One lost its KV blocks or its place to the foreground."""
        self._preempted.inc()
