"""vLLM's scheduler, narrowed to what a static-shape device can run in one step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from heapq import merge
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from rbln_backend.bucketing.chunk_plan import ChunkPlan
from rbln_backend.bucketing.table import prefill_chunk_table
from rbln_backend.grammar.backend import pin_backend
from rbln_backend.parallel.stages import decode_buckets, verify_table
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.scheduler.background import (
    Background,
    Rows,
    comes_seldom,
    is_background,
    reads_in_rows,
)
from rbln_backend.scheduler.constraints import (
    adapter_fits,
    decode_share,
    is_prefill,
    prefill_block_reason,
)
from rbln_backend.scheduler.draft_room import DraftRoom
from rbln_backend.scheduler.expiry import QueueExpiry, never_scheduled, report_expired
from rbln_backend.scheduler.foremost import behind_the_foremost
from rbln_backend.scheduler.narrowing import NarrowedScheduler
from rbln_backend.scheduler.output import forget_known_tokens, merge_reports
from rbln_backend.scheduler.prefix_reuse import PrefixReuse, settle_prefix_caching
from rbln_backend.scheduler.sharing import (
    StepBounds,
    adapter_of,
    goes_on_alike,
    prompts_together,
)
from rbln_backend.scheduler.turns import can_decode, needs_chunk
from rbln_backend.vllm_compat.patches import apply_patches
from rbln_backend.vllm_compat.surface import (
    EngineCoreOutputs,
    GrammarOutput,
    KVCacheConfig,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SchedulerOutput,
    VllmConfig,
    configured,
)


class RblnScheduler(NarrowedScheduler):
    """Each step is one prefill chunk or one decode batch, never both.

    Rules (``constraints.py``), in order:

    * a request in the middle of its prefill goes on before another is admitted;
    * ``decode_steps_per_chunk`` decode steps follow a prefill step while both have work;
    * a prefill step sees no decoding request, and admits at most one waiting request, or those
      that ``sharing.py`` puts into one chunk whole;
    * a chunk takes what ``ChunkPlan`` says, so that little is computed for padding;
    * a decode step leaves the other stages of a pipeline their share, and admits nobody but who
      of the background reads its prompt in a row that is padding, a token a step;
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
        self._background = Background(
            decode_buckets(vllm_config), self.max_num_running_reqs, self._stages, board
        )
        self._reads_in_rows = False
        self._expiry = QueueExpiry(configured(vllm_config).max_queue_ms / 1000)
        self._expired: list[Request] = []
        groups = len(self.kv_cache_config.kv_cache_groups)
        self._drafts = DraftRoom(verify_table(vllm_config), self.block_size, groups)

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
        prompts = [r for r in chain(self._waiting(), front) if _is_prompt_in_front(r)]
        taken = self._make_room(front, prompts)
        behind = [request for request in self._waiting() if is_background(request)]
        prefilling = self._prefilling()
        unread = [*prefilling, *behind]
        if not taken and self._background.may_prefill(
            unread, beside=bool(front), prompts=bool(prompts)
        ):
            # What is read in one go should be long.
            prefilling.sort(key=lambda r: r.num_computed_tokens - r.num_tokens)
            return self._schedule_among(prefilling, self.running, throttle_prefills)
        prefilling = [request for request in prefilling if not is_background(request)]
        return self._schedule_among(prefilling, front, throttle_prefills, behind)

    def _make_room(self, front: Sequence[Request], prompts: Sequence[Request]) -> list[Request]:
        """Preempt the background, the newest first, where the foreground lacks a place or blocks.

        Returns those that were preempted.
        """
        taken: list[Request] = []
        wanted = self._blocks_of(front, prompts[:1])
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

    def _blocks_of(self, decoding: Sequence[Request], prompts: Sequence[Request]) -> int:
        return self._reuse.coordinator.most_blocks(len(decoding), [r.num_tokens for r in prompts])

    def _schedule_among(
        self,
        prefilling: list[Request],
        decoding: Sequence[Request],
        throttle_prefills: bool,
        behind: Sequence[Request] = (),
    ) -> SchedulerOutput:
        """A chunk of ``prefilling`` or of who waits, unless ``decoding`` is owed the step.

        Those ``behind`` wait for padding and do not see a chunk.
        """
        with self._held_back(behind):
            if self._prefill_block_reason(len(prefilling), decoding) is not None:
                output = None
            else:
                output = self._schedule_prefill(prefilling, throttle_prefills)
        if output is None:
            self._decodes_owed = max(0, self._decodes_owed - 1)
            return self._schedule_decode(throttle_prefills)
        if output.total_num_scheduled_tokens > 0:
            self._decodes_owed = self._decode_steps_per_chunk
            return output
        if not self.running:
            return output
        # Nothing could be admitted (no KV blocks, or grammars still compiling): the step
        # belongs to the decodes, and what the first attempt reported must not be lost.
        return merge_reports(output, self._schedule_decode(throttle_prefills))

    def _prefilling(self) -> list[Request]:
        return [request for request in self.running if needs_chunk(request)]

    def _waiting(self) -> Iterable[Request]:
        return chain(self.skipped_waiting, self.waiting)

    def _prefill_block_reason(self, num_prefilling: int, decoding: Sequence[Request]) -> str | None:
        return prefill_block_reason(
            num_prefilling=num_prefilling,
            num_waiting=len(self.waiting) + len(self.skipped_waiting),
            num_running=len(self.running),
            max_num_seqs=self.max_num_running_reqs,
            decodes_owed=self._decodes_owed > 0 and any(map(can_decode, decoding)),
        )

    def _schedule_prefill(
        self, prefilling: list[Request], throttle_prefills: bool
    ) -> SchedulerOutput:
        strangers = self._without_adapter_room()
        others = [r for r in self._waiting() if r not in strangers]
        with self._held_back(strangers), self._held_back(behind_the_foremost(others)):
            together = self._together(prefilling)
            visible = [r for r in prefilling if r.request_id in together] or prefilling[:1]
            hidden = [request for request in self.running if request not in visible]
            with (
                self._narrowed(visible, hidden, max_running=max(1, len(together))),
                self._cut(visible, hidden, together),
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
        bounds = StepBounds(
            requests=self.max_num_running_reqs - len(self.running) + len(prefilling),
            tokens=self.max_num_scheduled_tokens,
            prompt_tokens=self._most_of_a_prompt(self._chunks.largest),
        )
        waiting = takewhile(self._can_begin, self._in_turn())
        return prompts_together(self._chunks, prefilling, waiting, bounds, self._reuse.manager)

    def _most_of_a_prompt(self, tokens: int) -> int:
        """Of so many tokens that a prompt lacks, what upstream lets one step take."""
        return min(tokens, self.scheduler_config.long_prefill_token_threshold or tokens)

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

    def _schedule_decode(self, throttle_prefills: bool) -> SchedulerOutput:
        rows, beginner = Rows(self.running), None
        if self._background.is_there(self.requests):
            rows = self._background.rows(self.running)
            beginner = self._beginner(rows)
        elif hidden := self._prefilling():
            rows = Rows([r for r in self.running if r not in hidden], hidden=hidden)
        self._drafts.cut(rows.decoding, self.kv_cache_manager.block_pool)
        if beginner is None:
            return self._schedule_rows(rows, 0, throttle_prefills)
        others = [request for request in self._waiting() if request is not beginner]
        with self._held_back(others), self._without_drafts():
            output = self._schedule_rows(rows, 1, throttle_prefills)
        if beginner.request_id in output.num_scheduled_tokens:
            self._background.began()
        return output

    def _schedule_rows(
        self, rows: Rows, beginners: int, throttle_prefills: bool
    ) -> SchedulerOutput:
        visible = rows.decoding + rows.readers if rows.readers else rows.decoding
        count = len(visible) + beginners
        share = decode_share(count, self.max_num_running_reqs, self._stages)
        self._reads_in_rows = True
        try:
            with (
                self._narrowed(visible, rows.hidden, max_running=count),
                self._at_most(share if self._stages > 1 else None),
            ):
                return super().schedule(throttle_prefills)
        finally:
            self._reads_in_rows = False

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Upstream's last word on the tokens of a prompt that a step computes: a row takes one."""
        if self._reads_in_rows and is_prefill(num_computed_tokens, request.num_tokens):
            return 1
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        return tokens

    def _beginner(self, rows: Rows) -> Request | None:
        """Who of the background begins to read in a row of this step that is padding.

        Nobody while a prompt of the foreground is unread, or where its blocks would be few.
        """
        if not rows.spare or len(self.running) >= self.max_num_running_reqs:
            return None
        waiting = list(self._in_turn())
        if any(map(_is_prompt_in_front, chain(waiting, rows.hidden))):
            return None
        strangers = self._without_adapter_room()
        able = (r for r in waiting if reads_in_rows(r) and r not in strangers)
        first = next(filter(self._can_begin, able), None)
        pool = self.kv_cache_manager.block_pool
        if first is None or goes_on_alike(first, self._prefilling(), pool.hash_block_size):
            return None
        fits = pool.get_num_free_blocks() >= self._blocks_of(rows.decoding, [first])
        return first if fits else None

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
        return [r for r in self._waiting() if not adapter_fits(adapter_of(r), running, limit)]

    def _cut(
        self, prefilling: Sequence[Request], others: Sequence[Request], together: dict[str, int]
    ) -> AbstractContextManager[None]:
        """Give the step the prompts ``together``, or what its request's next chunk should take.

        What a waiting request will get from the prefix cache is not known yet: its first chunk is
        planned as if it got nothing. One of the background comes seldom beside ``others``: all of
        it that fits.
        """
        if together:
            return self._whole_prompts(sum(together.values()))
        request = prefilling[0] if prefilling else self._next_waiting()
        if self._chunks is None or request is None or comes_seldom(request, others):
            return self._at_most(None)
        left = self._most_of_a_prompt(request.num_tokens - request.num_computed_tokens)
        return self._at_most(self._chunks.next_chunk(left))

    def _next_waiting(self) -> Request | None:
        queue = self._select_waiting_queue_for_scheduling()
        return None if queue is None else queue.peek_request()


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


def _is_prompt_in_front(request: Request) -> bool:
    return not is_background(request) and needs_chunk(request)
