"""Background requests use spare capacity: rows that would be padding, and idle steps.

A decode graph of bucket B computes B rows whatever is in them. While n requests of the foreground
decode, the background uses the other B - n rows of their bucket: first for its decoding requests,
oldest first, then for prompts, one token per row and step (decode prefill). The other background
requests are *parked*: hidden from the step, with their KV blocks. The newest are preempted only
where the foreground lacks capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from rbln_backend.bucketing.buckets import BucketTable
from rbln_backend.config import BACKGROUND_PRIORITY
from rbln_backend.reporting.metrics_board import MetricsBoard
from rbln_backend.scheduler.constraints import can_decode, decode_share, needs_chunk
from rbln_backend.vllm_compat.surface import Request

STEPS_PER_CHUNK = 128
"""Foreground steps between two chunks of background prompts."""

LEAST_LEFT = 32
"""Fewest missing prompt tokens that get such a chunk; decode prefill is as fast for fewer."""


def is_background(request: Request) -> bool:
    """Return whether ``request`` uses only spare capacity."""
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
        """The requests of the step."""
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
        """Register a new request."""
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
        if beside and (
            self._steps_beside <= STEPS_PER_CHUNK or not any(map(_is_worth_a_chunk, unread))
        ):
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
        spare_capacity = self._padding(len(rows.decoding)) if beside else len(back)
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
        """Count a waiting request that took a padding row."""
        self._rows["prompt"].inc()

    def preempted(self) -> None:
        """Count a request that lost its KV blocks or its slot to the foreground."""
        self._preempted.inc()

    def _padding(self, num_decoding: int) -> int:
        """Return the padding rows of the steps of ``num_decoding``, over all pipeline stages."""
        if self._buckets is None:
            return 0
        share = decode_share(num_decoding, self._max_num_seqs, self._stages)
        return self._buckets.find(share) * self._stages - num_decoding


def _is_worth_a_chunk(request: Request) -> bool:
    left = request.num_tokens - request.num_computed_tokens
    return left >= LEAST_LEFT or not can_decode_prefill(request)
