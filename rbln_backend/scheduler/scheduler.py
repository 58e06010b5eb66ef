"""vLLM's scheduler, narrowed to what a static-shape device can run in one step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import merge
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from rbln_backend.bucketing.chunk_plan import ChunkPlan
from rbln_backend.bucketing.table import prefill_chunk_table
from rbln_backend.bucketing.verify import NO_DRAFTS
from rbln_backend.grammar.backend import pin_backend
from rbln_backend.parallel.stages import decode_buckets, verify_table
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.scheduler.background import (
    Background,
    background_last,
    comes_seldom,
    is_background,
)
from rbln_backend.scheduler.constraints import (
    adapter_fits,
    decode_share,
    is_prefill,
    prefill_block_reason,
)
from rbln_backend.scheduler.expiry import QueueExpiry, never_scheduled, report_expired
from rbln_backend.scheduler.foremost import behind_the_foremost
from rbln_backend.scheduler.output import forget_known_tokens
from rbln_backend.scheduler.prefix_reuse import PrefixReuse, settle_prefix_caching
from rbln_backend.scheduler.sharing import adapter_of, prompts_together
from rbln_backend.vllm_compat.patches import apply_patches
from rbln_backend.vllm_compat.surface import (
    EngineCoreOutputs,
    GrammarOutput,
    KVCacheConfig,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
    VllmConfig,
    configured,
)


class RblnScheduler(Scheduler):
    """Each step is one prefill chunk or one decode batch, never both.

    Rules (``constraints.py``), in order:

    * a request in the middle of its prefill goes on before another is admitted;
    * ``decode_steps_per_chunk`` decode steps follow a prefill step while both have work;
    * a prefill step sees no decoding request, and admits at most one waiting request, or those
      that ``sharing.py`` puts into one chunk whole;
    * a chunk takes what ``ChunkPlan`` says, so that little is computed for padding;
    * a decode step admits nobody, and leaves the other stages of a pipeline their share;
    * all running requests together use at most ``max_loras`` adapters;
    * of those that wait, the foremost (``foremost.py``) are admitted before all others;
    * the background (``background.py``) runs in rows and steps that nobody else would use.

    Admission, KV blocks, preemption, prefix hits and aborts are upstream's, unchanged: each rule
    only hides requests from, or caps, one call of ``Scheduler.schedule``.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **options: Any
    ) -> None:
        # The engine's process has no rank in it where there are several.
        apply_patches()
        settle_prefix_caching(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **options)
        if vllm_config.model_config.runner_type == "pooling":
            # Upstream keeps a slot of the context for a sampled token; a prompt that fills the
            # context would wait for it without end (vllm-project/vllm#47971).
            self.num_sampled_tokens_per_step = 0
        board = _board(vllm_config)
        self._mask_seconds = board.histogram("rbln_grammar_mask_seconds", part="fill")
        self._reuse = PrefixReuse.install(self, vllm_config, board)
        pin_backend(self.structured_output_manager, vllm_config)
        self._decode_steps_per_chunk = configured(vllm_config).decode_steps_per_chunk
        self._decodes_owed = 0
        self._stages = vllm_config.parallel_config.pipeline_parallel_size
        self._chunks = _chunk_plan(vllm_config)
        self._background = Background(decode_buckets(vllm_config), board)
        self._expiry = QueueExpiry(configured(vllm_config).max_queue_ms / 1000)
        self._expired: list[Request] = []
        self._verify = verify_table(vllm_config)

    def add_request(self, request: Request) -> None:
        self._reuse.hash(request)
        super().add_request(request)
        self._background.add(request)
        if not is_background(request):
            self._expiry.add(request.request_id, waited_s=time.time() - request.arrival_time)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._end_late_requests()
        output = self._schedule_step(throttle_prefills)
        forget_known_tokens(output.scheduled_cached_reqs)
        return self._reuse.finish(output)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if not scheduler_output.has_structured_output_requests:
            return None
        started = time.perf_counter()
        found = super().get_grammar_bitmask(scheduler_output)
        if found is not None:
            self._mask_seconds.observe(time.perf_counter() - started)
        return found

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._reuse.report()
        if self._expired:
            report_expired(self._expired, outputs)
            self._expired.clear()
        return outputs

    def _end_late_requests(self) -> None:
        """End what has waited too long for its first turn; who was preempted has had one."""
        late = [i for i in self._expiry.take_due() if never_scheduled(self.requests.get(i))]
        if late:
            self._expired += self.finish_requests(late, RequestStatus.FINISHED_ERROR)

    def _schedule_step(self, throttle_prefills: bool) -> SchedulerOutput:
        if not self._background.is_there(self.requests):
            return self._schedule_among(self._prefilling(), self.running, throttle_prefills)
        front = [request for request in self.running if not is_background(request)]
        waiting = list(chain(self.skipped_waiting, self.waiting))
        prompts = [r for r in chain(waiting, front) if not is_background(r) and _is_prefill(r)]
        taken = self._make_room(front, prompts)
        if taken or not self._background.may_prefill(beside=bool(front), prompts=bool(prompts)):
            prefilling = [request for request in front if _is_prefill(request)]
            with self._held_back([*taken, *(r for r in waiting if is_background(r))]):
                return self._schedule_among(prefilling, front, throttle_prefills)
        return self._schedule_among(self._prefilling(), self.running, throttle_prefills)

    def _make_room(self, front: Sequence[Request], prompts: Sequence[Request]) -> list[Request]:
        """Preempt the background, the newest first, where the foreground lacks a place or blocks.

        What its next step could take: a block in each group for a token, and a whole prompt.
        Returns those that were preempted.
        """
        taken: list[Request] = []
        wanted = len(front) * len(self.kv_cache_config.kv_cache_groups)
        wanted += -(-prompts[0].num_tokens // self.block_size) if prompts else 0
        comes = bool(prompts) and prompts[0] not in front
        pool = self.kv_cache_manager.block_pool
        for request in [r for r in reversed(self.running) if is_background(r)]:
            lacks_place = comes and len(self.running) >= self.max_num_running_reqs
            if not lacks_place and pool.get_num_free_blocks() >= wanted:
                break
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            self._background.preempted()
            taken.append(request)
        return taken

    def _schedule_among(
        self, prefilling: list[Request], decoding: Sequence[Request], throttle_prefills: bool
    ) -> SchedulerOutput:
        """A chunk of ``prefilling`` or of who waits, unless ``decoding`` is owed the step."""
        if self._prefill_block_reason(len(prefilling), decoding) is None:
            output = self._schedule_prefill(prefilling[:1], throttle_prefills)
            if output.total_num_scheduled_tokens > 0:
                self._decodes_owed = self._decode_steps_per_chunk
                return output
            if not self.running:
                return output
            # Nothing could be admitted (no KV blocks, or grammars still compiling): the step
            # belongs to the decodes, and what the first attempt reported must not be lost.
            return _merge_reports(output, self._schedule_decode(throttle_prefills))
        self._decodes_owed = max(0, self._decodes_owed - 1)
        return self._schedule_decode(throttle_prefills)

    def _prefilling(self) -> list[Request]:
        return [request for request in self.running if _is_prefill(request)]

    def _prefill_block_reason(self, num_prefilling: int, decoding: Sequence[Request]) -> str | None:
        return prefill_block_reason(
            num_prefilling=num_prefilling,
            num_waiting=len(self.waiting) + len(self.skipped_waiting),
            num_running=len(self.running),
            max_num_seqs=self.max_num_running_reqs,
            decodes_owed=self._decodes_owed > 0 and any(map(_can_decode, decoding)),
        )

    def _schedule_prefill(
        self, prefilling: list[Request], throttle_prefills: bool
    ) -> SchedulerOutput:
        hidden = [request for request in self.running if request not in prefilling]
        waiting = chain(self.skipped_waiting, self.waiting)
        held_back = self._without_adapter_room()
        with (
            self._held_back(held_back),
            self._held_back(behind_the_foremost(r for r in waiting if r not in held_back)),
        ):
            together = self._together(prefilling)
            with (
                self._narrowed(prefilling, hidden, max_running=max(1, len(together))),
                self._whole(together) if together else self._cut(prefilling, hidden),
                self._without_drafts(),
            ):
                output = super().schedule(throttle_prefills)
        taken = output.num_scheduled_tokens
        assert len(taken) <= 1 or taken.keys() <= together.keys(), (
            "vLLM's Scheduler.schedule does not heed max_num_running_reqs, or takes others first"
        )
        return output

    def _together(self, prefilling: list[Request]) -> dict[str, int]:
        """Prompts for one chunk and what each lacks; see ``prompts_together``."""
        if self._chunks is None or self._chunks.prompts == 1:
            return {}
        if len(prefilling) + len(self.waiting) + len(self.skipped_waiting) < 2:
            return {}
        room = self.max_num_running_reqs - len(self.running) + len(prefilling)
        waiting = takewhile(self._can_begin, self._in_turn())
        return prompts_together(self._chunks, prefilling, waiting, room, self.kv_cache_manager)

    def _in_turn(self) -> Iterable[Request]:
        """All that wait, in the order in which upstream looks at them."""
        by_priority = self.policy.value == "priority"
        return (merge if by_priority else chain)(self.skipped_waiting, self.waiting)

    def _can_begin(self, request: Request) -> bool:
        """Whether upstream will take it next: no grammar of it is being compiled, for one."""
        is_blocked = self._is_blocked_waiting_status(request.status)
        if is_blocked and not self._try_promote_blocked_waiting_request(request):
            return False
        return not request.num_stale_output_tokens

    @contextmanager
    def _whole(self, together: Mapping[str, int]) -> Iterator[None]:
        """Give the step the tokens of these prompts, and let upstream cut none of them."""
        self.scheduler_config.enable_chunked_prefill = False
        try:
            with self._at_most(sum(together.values())):
                yield
        finally:
            self.scheduler_config.enable_chunked_prefill = True

    def _schedule_decode(self, throttle_prefills: bool) -> SchedulerOutput:
        decoding, hidden = self.running, self._prefilling()
        if hidden:
            decoding = [request for request in self.running if request not in hidden]
        if self._background.is_there(self.requests):
            decoding, parked = self._background.rows(decoding)
            hidden = parked + hidden
        self._cut_drafts(decoding)
        share = decode_share(len(decoding), self.max_num_running_reqs, self._stages)
        with (
            self._narrowed(decoding, hidden, max_running=len(decoding)),
            self._at_most(share if self._stages > 1 else None),
        ):
            return super().schedule(throttle_prefills)

    def _cut_drafts(self, decoding: Sequence[Request]) -> None:
        """Keep of each request's drafts what a compiled step takes, none where blocks are few.

        A draft must not take a block for which another request would be preempted.
        """
        if self._verify is NO_DRAFTS or not decoding:
            return
        longest = self._verify.longest(len(decoding))
        # What a request's tokens may need of each group.
        each = (1 + longest // self.block_size) * len(self.kv_cache_config.kv_cache_groups)
        if self.kv_cache_manager.block_pool.get_num_free_blocks() < len(decoding) * each:
            longest = 1
        for request in decoding:
            del request.spec_token_ids[longest - 1 :]

    @contextmanager
    def _without_drafts(self) -> Iterator[None]:
        """Let upstream not fill the only token of a request that comes in up with drafts."""
        drafts, self.num_spec_tokens = self.num_spec_tokens, 0
        try:
            yield
        finally:
            self.num_spec_tokens = drafts

    def _without_adapter_room(self) -> list[Request]:
        """Waiting requests whose adapters would be too many beside those of all that run.

        Upstream looks for them among what it sees of the running requests, and skips them, too.
        """
        if self.lora_config is None:
            return []
        running = {r.lora_request.lora_int_id for r in self.running if r.lora_request}
        limit = self.lora_config.max_loras
        if len(running) < limit:
            return []
        waiting = chain(self.skipped_waiting, self.waiting)
        return [r for r in waiting if not adapter_fits(adapter_of(r), running, limit)]

    @contextmanager
    def _cut(self, prefilling: list[Request], others: Sequence[Request]) -> Iterator[None]:
        """Give the step as many tokens as its request's next chunk should take.

        What a waiting request will get from the prefix cache is not known yet: its first chunk is
        planned as if it got nothing. One of the background comes seldom beside ``others``: all of
        it that fits.
        """
        request = prefilling[0] if prefilling else self._next_waiting()
        tokens = None
        if self._chunks is not None and request is not None and not comes_seldom(request, others):
            left = request.num_tokens - request.num_computed_tokens
            tokens = self._chunks.next_chunk(left)
        with self._at_most(tokens):
            yield

    @contextmanager
    def _at_most(self, tokens: int | None) -> Iterator[None]:
        """Give the step ``tokens`` tokens; None: as many as any."""
        whole_budget = self.max_num_scheduled_tokens
        if tokens is not None:
            self.max_num_scheduled_tokens = tokens
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = whole_budget

    def _next_waiting(self) -> Request | None:
        queue = self._select_waiting_queue_for_scheduling()
        return None if queue is None else queue.peek_request()

    @contextmanager
    def _held_back(self, requests: list[Request]) -> Iterator[None]:
        """Let upstream not see waiting ``requests``; they keep their places, as skipped ones do."""
        if requests:
            self.skipped_waiting.remove_requests(requests)
            self.waiting.remove_requests(requests)
        try:
            yield
        finally:
            for request in reversed(requests):
                self.skipped_waiting.prepend_request(request)

    @contextmanager
    def _narrowed(
        self, visible: list[Request], hidden: list[Request], *, max_running: int
    ) -> Iterator[None]:
        """Let upstream see only ``visible``; hidden requests come back whatever happens."""
        full_capacity, before = self.max_num_running_reqs, self.running
        before_prefill = hidden and not _is_prefill(hidden[0])
        self.running, self.max_num_running_reqs = visible, max_running
        try:
            yield
        finally:
            self.max_num_running_reqs = full_capacity
            # The newest request stays last: upstream preempts from the end.
            self.running = hidden + self.running if before_prefill else self.running + hidden
            if self._background.is_there(self.requests):
                self.running = background_last(self.running, before)


def _board(config: VllmConfig) -> MetricsBoard:
    """The scheduler's, which lives once in each engine."""
    run_dir = configured(config).run_dir
    name = f"scheduler{config.parallel_config.data_parallel_index}"
    return MetricsBoard(Path(run_dir) if run_dir else None, name)


def _chunk_plan(config: VllmConfig) -> ChunkPlan | None:
    """None for models that pool: the prompts of encoders cannot be cut."""
    if config.model_config.runner_type == "pooling":
        return None
    rbln = configured(config)
    assert rbln.prefill_step_tokens is not None
    table = prefill_chunk_table(rbln, config.scheduler_config.max_num_batched_tokens)
    return ChunkPlan(table, rbln.prefill_step_tokens, rbln.chunk_prompts)


def _is_prefill(request: Request) -> bool:
    pools = request.pooling_params is not None
    return is_prefill(request.num_computed_tokens, request.num_tokens, pools=pools)


def _can_decode(request: Request) -> bool:
    """Whether its next token can be computed now: not while a step that makes one is under way."""
    return not _is_prefill(request) and request.num_computed_tokens < request.num_tokens


def _merge_reports(first: SchedulerOutput, second: SchedulerOutput) -> SchedulerOutput:
    """Carry what an empty first attempt told the workers into the step that runs."""
    second.finished_req_ids = first.finished_req_ids | second.finished_req_ids
    second.free_encoder_mm_hashes = first.free_encoder_mm_hashes + second.free_encoder_mm_hashes
    if first.preempted_req_ids:
        second.preempted_req_ids = first.preempted_req_ids | (second.preempted_req_ids or set())
    if first.kv_cache_block_copies:
        later = second.kv_cache_block_copies or []
        second.kv_cache_block_copies = first.kv_cache_block_copies + later
    return second
