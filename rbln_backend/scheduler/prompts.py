"""The prompts that a prefill step computes, and what one call of vLLM's ``schedule`` sees.

Prompts share a step where its chunk holds all of them whole. Each gets the same tokens as alone,
bit for bit: rows of a step are independent. A request must not read KV that another request of the
same step writes. So a prompt that shares the next prefix of another one waits for a later step, in
which that prefix is a hit.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request

from rbln_backend.buckets import BucketTable, ChunkPlan
from rbln_backend.config import PROGRESS_ARGS, PROMPT_PROGRESS
from rbln_backend.kv_cache.coordinator import RblnKvCacheManager
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.prefix_reuse import PrefixReuse, publish_events
from rbln_backend.scheduler.priorities import (
    PrefillOrder,
    background_last,
    behind_priority,
    is_background,
)
from rbln_backend.scheduler.steps import is_prefill, needs_chunk
from rbln_backend.settings import configured

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from rbln_backend.kv_transfer.nixl import PromptScheduling


@dataclass(slots=True, kw_only=True)
class StepView:
    """The part of a scheduler that one step sees."""

    running: list[Request]
    hidden: Sequence[Request]
    """Running requests that take no part in the step."""
    max_running: int
    max_tokens: int | None = None
    """Token budget of the step; None, or more than vLLM's own budget: vLLM's."""
    cuts_prompts: bool = True
    adds_drafts: bool = True
    """False disables drafts for this step."""
    decode_prefill: bool = False
    """True computes one token of each prompt, in a decode row."""
    left_out: Set[str] = frozenset()
    """Names of running requests that the step does not compute, and may preempt."""


class StepBounds(NamedTuple):
    """Limits of vLLM's scheduler for one step."""

    requests: int
    tokens: int
    """Tokens of all requests together."""
    prompt_tokens: int
    """Tokens of one prompt; the rest is left for later steps."""


def get_adapter(request: Request) -> int | None:
    return request.lora_request.lora_int_id if request.lora_request else None


def prompts_together(
    plan: ChunkPlan,
    prefilling: Sequence[Request],
    waiting: Iterable[Request],
    bounds: StepBounds,
    cache: RblnKvCacheManager,
) -> dict[str, int]:
    """Return the missing tokens of each prompt of the next prefill step, by request id.

    Empty where the step should take a chunk of one prompt. ``prefilling`` prompts are partly
    computed, ``waiting`` requests can begin; both are in order of admission. Prompts are taken
    whole: none that ``bounds`` would cut is included.
    """
    chosen = _Chosen(cache.block_pool.hash_block_size)
    most = min(bounds.requests, plan.prompts)
    for request in takewhile(chosen.has_adapter, prefilling[:most]):
        chosen.add(request, request.num_computed_tokens)
    for request in waiting:
        if len(chosen.requests) >= most or sum(chosen.left) >= plan.largest:
            break
        if not chosen.suits(request):
            break
        hit = request.num_computed_tokens or cache.peek_hit(request)
        chosen.add(request, hit)
    whole = list(takewhile(lambda tokens: tokens <= bounds.prompt_tokens, chosen.left))
    count = plan.together(whole) if whole else 1
    while sum(whole[:count]) > bounds.tokens and count > 1:
        count -= 1
    if count == 1:
        return {}
    ids = [request.request_id for request in chosen.requests[:count]]
    return dict(zip(ids, chosen.left, strict=False))


@dataclass(slots=True)
class _Chosen:
    unit: int
    """Tokens between two positions where a prefix can be hit."""
    requests: list[Request] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def add(self, request: Request, start: int) -> None:
        self.requests.append(request)
        self.left.append(request.num_tokens - start)
        self._starts.append(start)

    def has_adapter(self, request: Request) -> bool:
        """Return whether ``request`` has the adapter of the chosen ones."""
        return not self.requests or get_adapter(request) == get_adapter(self.requests[0])

    def suits(self, request: Request) -> bool:
        """Return whether it has that adapter and shares no chosen request's next prefix."""
        others = zip(self.requests, self._starts, strict=True)
        return self.has_adapter(request) and not any(
            _adds_prefix_of(request, other, start, self.unit) for other, start in others
        )


def will_compute_prefix_of(request: Request, others: Iterable[Request], unit: int) -> bool:
    """Return whether one of ``others`` will compute a prefix that ``request`` could hit.

    ``unit``: tokens between two positions where a prefix can be hit.
    """
    return any(_adds_prefix_of(request, r, r.num_computed_tokens, unit) for r in others)


def _adds_prefix_of(request: Request, other: Request, start: int, unit: int) -> bool:
    """Return whether the next prefix of ``other`` after ``start`` tokens is one of ``request``."""
    # A prefix hash covers all tokens before it.
    place, hashes, theirs = start // unit, request.block_hashes, other.block_hashes
    return place < min(len(hashes), len(theirs)) and hashes[place] == theirs[place]


class Turn(NamedTuple):
    """The requests of a prefill step."""

    running: list[Request]
    """Prompts that are partly computed."""
    held_back: list[Request]
    """Waiting requests that the step must not admit."""
    together: dict[str, int]
    """Missing tokens of the prompts that share the chunk, by request id; empty for one prompt."""


class PromptScheduler(Scheduler):
    """vLLM's scheduler with the choice of the prompts that a prefill step computes.

    Single calls of it are narrowed to a ``StepView``; nothing outlasts a call.
    """

    _decode_prefill = False
    _left_out: Set[str] = frozenset()

    _chunks: ChunkPlan | None
    _reuse: PrefixReuse
    _order: PrefillOrder | None
    """None for ``prefill_policy="fcfs"`` and for models that pool."""
    _decode_steps_per_chunk: int
    _most_partial: int
    """Prompts that may be partly computed at the same time."""

    @contextmanager
    def _narrowed(self, view: StepView) -> Iterator[None]:
        """Restrict the scheduler to ``view``; on exit hidden requests are running again."""
        before, capacity = self.running, self.max_num_running_reqs
        budget, drafts = self.max_num_scheduled_tokens, self.num_spec_tokens
        self.running, self.max_num_running_reqs = view.running, view.max_running
        if view.max_tokens is not None:
            self.max_num_scheduled_tokens = min(view.max_tokens, budget)
        if not view.adds_drafts:
            self.num_spec_tokens = 0
        if not view.cuts_prompts:
            self.scheduler_config.enable_chunked_prefill = False
        self._decode_prefill, self._left_out = view.decode_prefill, view.left_out
        try:
            yield
        finally:
            self._decode_prefill, self._left_out = False, frozenset()
            if not view.cuts_prompts:
                self.scheduler_config.enable_chunked_prefill = True
            self.num_spec_tokens, self.max_num_scheduled_tokens = drafts, budget
            self.max_num_running_reqs = capacity
            if view.running is not before:
                # The newest request stays last: upstream preempts from the end.
                self.running = background_last([*view.hidden, *self.running], before)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return the tokens of a request that a step computes: 1 of a prompt in a decode row."""
        if request.request_id in self._left_out:
            return 0
        if self._decode_prefill and is_prefill(num_computed_tokens, request.num_tokens):
            return 1
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        return tokens

    @contextmanager
    def _held_back(self, requests: Sequence[Request]) -> Iterator[None]:
        """Hide waiting ``requests``; on exit they are back in front, as skipped requests are."""
        if requests:
            self.skipped_waiting.remove_requests(requests)
            self.waiting.remove_requests(requests)
        try:
            yield
        finally:
            for request in reversed(requests):
                self.skipped_waiting.prepend_request(request)

    @cached_property
    def _remote(self) -> PromptScheduling | None:
        if self.connector is None:
            return None
        # A fifth of a second that other engines do not need.
        from rbln_backend.kv_transfer.nixl import PromptScheduling, RblnNixlConnector

        assert isinstance(self.connector, RblnNixlConnector)
        side = self.connector.connector_scheduler
        assert isinstance(side, PromptScheduling)
        return side

    def _request_blocks(self, throttle_prefills: bool) -> SchedulerOutput | None:
        """Admit waiting requests whose blocks another server has, to wait until they are here.

        Returns a step without tokens; None where there is nothing to request.
        """
        remote = self._remote
        if remote is None or not remote.unrequested(self._waiting()):
            return None
        others = [r for r in self._waiting() if not remote.is_unrequested(r)]
        view = StepView(running=[], hidden=list(self.running), max_running=1)
        with self._held_back(others), self._narrowed(view):
            output = Scheduler.schedule(self, throttle_prefills)
        assert not output.num_scheduled_tokens, "a request with offered blocks was computed"
        return output

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> Any:
        """Return None: a step may take several calls of upstream, and is described once."""

    def _prefilling(self) -> list[Request]:
        return [request for request in self.running if needs_chunk(request)]

    def _waiting(self) -> Iterable[Request]:
        return chain(self.skipped_waiting, self.waiting)

    def reset_prefix_cache(self, *args: bool, **options: bool) -> bool:
        done = super().reset_prefix_cache(*args, **options)
        publish_events(self)
        return bool(done)

    def reset_connector_cache(self) -> bool:
        """Remove every page that the KV tiers hold of this model; False without tiers."""
        if self._reuse.tiers is not None:
            self._reuse.tiers.clear()
        return self._reuse.tiers is not None

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self._order is not None:
            self._order.add(request)

    def _preempt_request(self, request: Request, *positional: Any, **options: Any) -> None:
        super()._preempt_request(request, *positional, **options)
        if self._order is not None:
            self._order.add(request)

    def _free_request(self, request: Request, *positional: Any, **options: Any) -> Any:
        if self._order is not None:
            self._order.ended(request.request_id)
        if self._reuse.tiers is not None:
            self._reuse.tiers.forget(request)
        return super()._free_request(request, *positional, **options)

    def _prompts_in_front(self, running: Sequence[Request]) -> list[Request]:
        """Return the unread prompts of the foreground, of which ``running`` are partly computed.

        The first one is computed next.
        """
        requests = list(chain(self._waiting(), running))
        if self._order is not None and len(requests) > 1:
            able = self._order.first(filter(needs_chunk, running), 1, self._can_begin)
            requests = able + requests
        return [r for r in requests if needs_chunk(r) and not is_background(r)]

    def _next_turn(self, prefilling: list[Request]) -> Turn:
        """Return the requests of the next prefill step; ``prefilling`` are partly computed."""
        refused = self._inadmissible()
        ordered: list[Request] = []
        if self._order is not None and not any(map(is_background, prefilling)):
            ordered = self._in_order(self._order, prefilling, refused)
        if not ordered:
            return self._first_come(prefilling, refused)
        together = self._together([], ordered, len(ordered)) if len(ordered) > 1 else {}
        chosen = [r for r in ordered if r.request_id in together] or ordered[:1]
        running = [request for request in chosen if request in prefilling]
        admitted = [request for request in chosen if request not in prefilling]
        held_back = self._before_last(admitted)
        held_back += [request for request in refused if request not in held_back]
        return Turn(running, held_back, together)

    def _count(self, turn: Turn, prefilling: Sequence[Request], output: SchedulerOutput) -> None:
        """Count a prefill step of ``turn`` for the order of prompts."""
        if self._order is None:
            return
        tokens = output.num_scheduled_tokens
        computed = [self.requests[request_id] for request_id in tokens]
        if computed and not any(map(is_background, computed)):
            unread = [r for r in (*prefilling, *turn.held_back) if not is_background(r)]
            self._order.computed(computed, sum(tokens.values()), unread)

    def _first_come(self, prefilling: list[Request], refused: list[Request]) -> Turn:
        """Return the first partly computed prompt or waiting request, and those that join it."""
        others = [request for request in self._waiting() if request not in refused]
        held_back = [*refused, *behind_priority(others)]
        hidden, tiers = {id(request) for request in held_back}, self._reuse.tiers
        if tiers is not None:
            following = next((r for r in self._in_turn() if id(r) not in hidden), None)
            if following is not None and not tiers.may_begin(following):
                # Pages of the first waiting request that may begin are still read.
                return Turn(prefilling[:1], list(self._waiting()), {})
        together: dict[str, int] = {}
        if len(prefilling) + len(self.waiting) + len(self.skipped_waiting) > 1:
            waiting = (request for request in self._in_turn() if id(request) not in hidden)
            most = self.max_num_running_reqs - len(self.running) + len(prefilling)
            together = self._together(prefilling, takewhile(self._can_begin, waiting), most)
        running = [r for r in prefilling if r.request_id in together] or prefilling[:1]
        return Turn(running, held_back, together)

    def _in_order(
        self, order: PrefillOrder, partial: list[Request], refused: list[Request]
    ) -> list[Request]:
        """Return the next prompts in order; none if none can be computed now."""
        free = self.max_num_running_reqs - len(self.running)
        most = min(free, 1 if self._chunks is None else self._chunks.prompts)
        banned = {id(request) for request in refused}

        def can_begin(request: Request) -> bool:
            return id(request) not in banned and self._can_begin(request)

        able = order.first(partial, most, can_begin)
        return [r for r in able if r in partial or self._may_overtake(r, partial)]

    def _may_overtake(self, request: Request, partial: Sequence[Request]) -> bool:
        """Return whether a waiting prompt may begin beside ``partial`` ones.

        The pool must have blocks for all of them to their ends: prompts that lack blocks would
        preempt themselves, and compute their first chunks again.
        """
        if not partial:
            return True
        left = request.num_tokens - self._reuse.manager.peek_hit(request)
        if len(partial) >= self._most_partial and left > self.max_num_scheduled_tokens:
            return False
        blocks = self._reuse.coordinator.most_blocks(0, [request.num_tokens])
        blocks += self._inflight_prefill_reserved_blocks()
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks <= free

    def _before_last(self, admitted: Sequence[Request]) -> list[Request]:
        """Return the waiting requests that upstream would try before the last of ``admitted``."""
        before: list[Request] = []
        missing = {id(request) for request in admitted}
        for request in self._in_turn() if missing else ():
            if id(request) not in missing:
                before.append(request)
                continue
            missing.remove(id(request))
            if not missing:
                break
        return before

    def _together(
        self, prefilling: Sequence[Request], waiting: Iterable[Request], most: int
    ) -> dict[str, int]:
        """Return the missing tokens of at most ``most`` prompts for one shared chunk, by id.

        Empty for a chunk of one prompt; see ``prompts_together``.
        """
        if self._chunks is None or self._chunks.prompts == 1:
            return {}
        bounds = StepBounds(
            requests=most,
            tokens=self.max_num_scheduled_tokens,
            prompt_tokens=self._most_of_a_prompt(self._chunks.largest),
        )
        return prompts_together(self._chunks, prefilling, waiting, bounds, self._reuse.manager)

    def _most_of_a_prompt(self, tokens: int) -> int:
        """Return how many of ``tokens`` missing prompt tokens upstream allows in one step."""
        return min(tokens, self.scheduler_config.long_prefill_token_threshold or tokens)

    def _in_turn(self) -> Iterable[Request]:
        """Return all waiting requests in upstream's order of admission."""
        by_priority = self.policy.value == "priority"
        return (merge if by_priority else chain)(self.skipped_waiting, self.waiting)

    def _can_begin(self, request: Request) -> bool:
        """Return whether upstream can admit ``request`` now, e.g. its grammar is compiled."""
        is_blocked = self._is_blocked_waiting_status(request.status)
        if is_blocked and not self._try_promote_blocked_waiting_request(request):
            return False
        if self._remote is not None and self._remote.is_unrequested(request):
            return False
        if self._reuse.tiers is not None and not self._reuse.tiers.may_begin(request):
            return False
        return not request.num_stale_output_tokens

    def _inadmissible(self) -> list[Request]:
        """Return the waiting requests that must not be admitted yet.

        Their blocks are still to be requested from another server, or their adapter would exceed
        ``max_loras`` of all that run: upstream sees only some of the running requests.
        """
        if self._remote is not None:
            return self._remote.unrequested(self._waiting())
        if self.lora_config is None:
            return []
        running = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        if len(running) < self.lora_config.max_loras:
            return []
        return [r for r in self._waiting() if get_adapter(r) not in {None, *running}]


def chunk_plan(config: VllmConfig, chunks: BucketTable) -> ChunkPlan | None:
    """Return the chunk plan; None for pooling models, as encoders' prompts cannot be cut."""
    if config.model_config.runner_type == "pooling":
        return None
    rbln = configured(config)
    assert rbln.prefill_step_tokens is not None
    return ChunkPlan(chunks, rbln.prefill_step_tokens, rbln.chunk_prompts)


_LIMITS = (256, 2048, 16384)
_CLASSES = (*(f"to_{limit}" for limit in _LIMITS), "more")


class PromptReports:
    """Observes ``rbln_first_token_seconds`` of the foreground, and reports progress to streams.

    Only requests with ``PROGRESS_ARGS`` among their ``extra_args`` report progress, after each
    prefill step but the last: the first token follows that one. A report is an output without
    tokens, with ``PROMPT_PROGRESS`` as its stop reason.
    """

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
