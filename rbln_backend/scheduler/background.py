"""Requests that take what others leave: rows that would be padding, and steps without work.

A decode graph of bucket B computes B rows whatever is in them. While n requests of the foreground
decode, the background has the other B - n in the bucket of n: first those of it that decode, the
oldest first, then those that read their prompts there, a token a step. What is left is *parked*:
hidden from the step, with its KV blocks. They lose those, the newest first, only where the
foreground needs room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.config import BACKGROUND_PRIORITY
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.scheduler.constraints import decode_share
from rbln_backend.scheduler.turns import can_decode, needs_chunk
from rbln_backend.vllm_compat.surface import Request

STEPS_PER_CHUNK = 128
"""Steps of the foreground between two chunks of the background's prompts."""

LEAST_LEFT = 32
"""Tokens of a prompt that are worth such a chunk: fewer are read in rows as soon."""


def is_background(request: Request) -> bool:
    """Whether a request takes what others leave."""
    return request.priority >= BACKGROUND_PRIORITY


def reads_in_rows(request: Request) -> bool:
    """Whether its prompt can be read in decode rows, which tell nothing of a prompt's tokens."""
    params = request.sampling_params
    return params is not None and params.prompt_logprobs is None


def comes_seldom(request: Request, others: Sequence[Request]) -> bool:
    """Whether ``request`` has to wait for a chunk, because streams among ``others`` would."""
    return is_background(request) and not all(map(is_background, others))


def background_last(requests: Sequence[Request], before: Sequence[Request]) -> list[Request]:
    """``requests`` in the order that they had ``before``, new ones behind, the background last."""
    places = {id(request): place for place, request in enumerate(before)}
    new = len(places)
    return sorted(requests, key=lambda r: (is_background(r), places.get(id(r), new)))


@dataclass(slots=True)
class Rows:
    """The requests that run, as a decode step sees them."""

    decoding: list[Request] = field(default_factory=list)
    """The foreground first."""
    readers: list[Request] = field(default_factory=list)
    """Those that read a token of their prompts."""
    hidden: list[Request] = field(default_factory=list)
    spare: int = 0
    """Rows that are still padding, for who begins."""


class Background:
    """Knows whether there is any, and which rows and chunks it may have."""

    def __init__(
        self, buckets: BucketTable | None, max_num_seqs: int, stages: int, board: MetricsBoard
    ) -> None:
        """``buckets``: of decode steps, of which each of a pipeline's ``stages`` has one under way.

        None for a model that pools, whose steps have one row.
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

    def may_prefill(self, unread: Iterable[Request], *, beside: bool, prompts: bool) -> bool:
        """Whether this step may be a chunk of its prompts, of which ``unread`` are left.

        Never while ``prompts`` of the foreground wait. Where that runs ``beside``, a chunk holds up
        a token of each of its streams: so few of them that a 99th percentile stays, and for no
        prompt that rows will have read soon.
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
        """Who of ``running`` takes part in a decode step."""
        rows, back, unread = Rows(), list[Request](), list[Request]()
        for request in running:
            if not is_background(request):
                (rows.hidden if needs_chunk(request) else rows.decoding).append(request)
            else:
                (unread if needs_chunk(request) else back).append(request)
        beside = bool(rows.decoding)
        room = self._padding(len(rows.decoding)) if beside else len(back)
        run, parked = back[:room], back[room:]
        if any(map(can_decode, rows.decoding)):
            free = room - len(run)
            rows.readers = [r for r in unread if reads_in_rows(r)][:free]
            rows.spare = free - len(rows.readers)
        rows.decoding += run
        rows.hidden += parked + [r for r in unread if r not in rows.readers]
        self._rows["padding" if beside else "alone"].inc(len(run))
        self._rows["prompt"].inc(len(rows.readers))
        self._parked.set(sum(map(is_background, rows.hidden)))
        return rows

    def began(self) -> None:
        """One took a row that was still padding."""
        self._rows["prompt"].inc()

    def preempted(self) -> None:
        """One lost its KV blocks or its place to the foreground."""
        self._preempted.inc()

    def _padding(self, num_decoding: int) -> int:
        """Rows of the steps of so many that nobody has; a pipeline has several steps at once."""
        if self._buckets is None:
            return 0
        share = decode_share(num_decoding, self._max_num_seqs, self._stages)
        return self._buckets.find(share) * self._stages - num_decoding


def _is_worth_a_chunk(request: Request) -> bool:
    left = request.num_tokens - request.num_computed_tokens
    return left >= LEAST_LEFT or not reads_in_rows(request)
