"""vLLM's scheduler, narrowed to what a static-shape device can run in one step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rbln_backend.buckets import NO_DRAFTS, VerifyTable
from rbln_backend.config import NO_TOKEN, NO_TOKEN_LEFT, QUEUE_TIMEOUT
from rbln_backend.grammar.backend import StepMasks, pin_backend
from rbln_backend.reports.metrics import MetricsBoard
from rbln_backend.scheduler.plain_decode import PlainDecode
from rbln_backend.scheduler.prefix_reuse import PrefixReuse, settle_prefix_caching
from rbln_backend.scheduler.priorities import (
    Background,
    PrefillOrder,
    Rows,
    can_decode_prefill,
    comes_seldom,
    is_background,
)
from rbln_backend.scheduler.prompts import (
    PromptReports,
    PromptScheduler,
    StepView,
    Turn,
    chunk_plan,
    will_compute_prefix_of,
)
from rbln_backend.scheduler.steps import (
    DraftedOutput,
    can_decode,
    decode_share,
    forget_known_tokens,
    merge_reports,
)
from rbln_backend.settings import compiled_sizes, configured
from rbln_backend.vllm_patches import apply_patches


class QueueExpiry:
    """Queue of deadlines, from which a step takes the expired request ids.

    All requests have the same limit, so that deadlines are in order of arrival and a step checks
    only the first. The scheduler decides if an expired request is still waiting.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``limit_s``: seconds that a request may wait; 0 disables the limit."""
        self._limit_s = limit_s
        self._clock = clock
        self.due: deque[tuple[float, str]] = deque()
        """Deadlines and ids of requests, also of those that have begun since."""

    def add(self, request_id: str, waited_s: float) -> None:
        """Add a request that arrived ``waited_s`` seconds ago, measured on another clock."""
        if self._limit_s:
            waited_s = min(max(waited_s, 0.0), self._limit_s)
            self.due.append((self._clock() + self._limit_s - waited_s, request_id))

    def take_due(self) -> Iterator[str]:
        """Yield each request id once, after its deadline."""
        now = self._clock()
        while self.due and self.due[0][0] <= now:
            yield self.due.popleft()[1]


def never_scheduled(request: Request | None) -> bool:
    """Return whether ``request`` exists and waits for its first step."""
    return request is not None and request.status in (
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    )


def report_expired(requests: list[Request], outputs: dict[int, EngineCoreOutputs]) -> None:
    """Move the ends of ``requests`` to the front of a step's outputs, where vLLM reads them."""
    for request in requests:
        end = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=QUEUE_TIMEOUT,
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        step = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        step.outputs.insert(0, end)
    requests.clear()


def rows_of_other_steps(rows: Rows, most: int) -> tuple[set[str], bool]:
    """Return the names of requests that a step of ``most`` rows leaves to other steps.

    A pipeline's other stages may still compute a request's latest token, and drafts behind it.
    Also return True if the step is full without them.
    """
    ready = [r.request_id for r in rows.visible if r.num_computed_tokens < r.num_tokens]
    left_out = {request.request_id for request in rows.visible}.difference(ready[:most])
    return left_out, len(ready) >= most


def drafts_to_check(
    output: ModelRunnerOutput, requests: Mapping[str, Request]
) -> DraftTokenIds | None:
    """Return the drafts that came with a step's result, of requests that it leaves decoding."""
    if not isinstance(output, DraftedOutput) or output.drafts is None:
        return None
    pairs = zip(output.drafts.req_ids, output.drafts.draft_token_ids, strict=True)
    decoding: dict[str, list[int]] = {}
    for name, drafts in pairs:
        request = requests.get(name)
        # It may have ended or lost its blocks since the step began.
        if request is None or request.status != RequestStatus.RUNNING:
            continue
        if request.num_computed_tokens + 1 == request.num_tokens:
            decoding[name] = drafts
    return DraftTokenIds(list(decoding), list(decoding.values()))


class DraftCapacity:
    """Limits drafts to compiled sizes within the context and to free KV blocks.

    A step takes as many tokens of each request, padding included: none may lie beyond
    ``max_model_len``, where an NPU's op has no place for them. Drafts never cause a preemption.
    """

    def __init__(
        self, table: VerifyTable, block_size: int, groups: int, max_model_len: int
    ) -> None:
        """``groups``: number of KV cache groups; each holds every token."""
        self._table, self._block_size, self._groups = table, block_size, groups
        self._max_model_len = max_model_len

    def cut(self, rows: Rows, blocks: BlockPool) -> None:
        """Drop the drafts that no compiled step checks; drop all where free blocks are too few."""
        decoding = rows.decoding
        if not decoding:
            return
        room = self._max_model_len - max(r.num_computed_tokens for r in rows.visible)
        longest = self._table.longest(len(decoding), room)
        # Blocks that the tokens of one request can need.
        each = (1 + longest // self._block_size) * self._groups
        if blocks.get_num_free_blocks() < len(decoding) * each:
            longest = 1
        for request in decoding:
            del request.spec_token_ids[longest - 1 :]


class RblnScheduler(PromptScheduler):
    """Each step is one prefill chunk or one decode batch, by these rules in order:

    * the prompt with the fewest tokens left is read first (``PrefillOrder``), chunk by chunk;
      with ``prefill_policy="fcfs"`` a prompt is read to its end before another is admitted;
    * ``decode_steps_per_chunk`` decode steps follow a prefill step while both have work;
    * a prefill step sees no decoding request. It admits at most one waiting request, or several
      whose whole prompts fit into one chunk (``prompts_together``);
    * ``ChunkPlan`` chooses the tokens of a chunk, so that little padding is computed;
    * a decode step leaves the other stages of a pipeline their share. It admits only background
      prompts, one token per padding row;
    * all running requests together use at most ``max_loras`` adapters;
    * priority requests (``is_priority``) are admitted before all other waiting requests;
    * background requests (``Background``) use only spare rows and spare steps.

    Admission, KV blocks, preemption, prefix hits and aborts are upstream's, unchanged: each rule
    only hides requests from, or caps, one call of ``Scheduler.schedule``.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **options: Any
    ) -> None:
        # With several ranks the engine's process has no worker that applies them.
        apply_patches()
        settle_prefix_caching(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **options)
        if vllm_config.model_config.runner_type == "pooling":
            # Upstream keeps a slot of the context for a sampled token; a prompt that fills the
            # context would wait for it forever (vllm-project/vllm#47971).
            self.num_sampled_tokens_per_step = 0
        # Of the engine's one scheduler.
        run_dir = configured(vllm_config).run_dir
        name = f"scheduler{vllm_config.parallel_config.data_parallel_index}"
        board = MetricsBoard(Path(run_dir) if run_dir else None, name)
        self._reuse = PrefixReuse(self, vllm_config, board)
        self._plain = PlainDecode(self, self._reuse.manager)
        manager = self.structured_output_manager
        pin_backend(manager, vllm_config)
        self._masks = StepMasks(manager, self.requests, super().get_grammar_bitmask, board)
        self._decode_steps_per_chunk = configured(vllm_config).decode_steps_per_chunk
        self._decodes_owed = 0
        self._stages = vllm_config.parallel_config.pipeline_parallel_size
        sizes = compiled_sizes(vllm_config)
        self._chunks = chunk_plan(vllm_config, sizes.chunks)
        self._background = Background(sizes.decode, self.max_num_running_reqs, self._stages, board)
        self._expiry = QueueExpiry(configured(vllm_config).max_queue_ms / 1000)
        self._expired: list[Request] = []
        self._prompt_reports = PromptReports(board)
        self._drafts: DraftCapacity | None = None
        if sizes.verify is not NO_DRAFTS:
            groups = len(self.kv_cache_config.kv_cache_groups)
            self._drafts = DraftCapacity(sizes.verify, self.block_size, groups, self.max_model_len)
        self._most_partial = configured(vllm_config).max_num_partial_prefills
        self._order = None
        if configured(vllm_config).prefill_policy == "shortest" and self._chunks is not None:
            by_priority = self.policy.value == "priority"
            hit = self._reuse.manager.peek_hit
            self._order = PrefillOrder(hit, board, by_priority=by_priority)

    def add_request(self, request: Request) -> None:
        self._reuse.hash(request)
        super().add_request(request)
        self._background.add(request)
        if not is_background(request):
            self._expiry.add(request.request_id, waited_s=time.time() - request.arrival_time)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        reuse, requests = self._reuse, None
        if self._expiry.due:
            late = [i for i in self._expiry.take_due() if never_scheduled(self.requests.get(i))]
            if late:
                self._expired += self.finish_requests(late, RequestStatus.FINISHED_ERROR)
        if reuse.tiers is not None:
            # Blocks for the tokens of running requests stay free.
            reuse.tiers.place_pages(reuse.coordinator.most_blocks(len(self.running), ()))
        if self.connector is not None:
            requests = self._request_blocks(throttle_prefills)
        output = self._plain.schedule()
        if output is not None:
            self._decodes_owed = max(0, self._decodes_owed - 1)
        else:
            output = self._schedule_step(throttle_prefills)
            forget_known_tokens(output.scheduled_cached_reqs)
            self._plain.note(output)
        if reuse.moves_kv:
            output = reuse.with_moves(output)
        else:
            reuse.coordinator.unwritten.clear()
        if self.connector is not None:
            # What the ranks have to read, and to keep for other servers.
            output = output if requests is None else merge_reports(requests, output)
            output.kv_connector_metadata = self.connector.build_connector_meta(output)
        if output.has_structured_output_requests:
            self._masks.begin(output)
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if not scheduler_output.has_structured_output_requests:
            return None
        return self._masks.take(scheduler_output)

    def shutdown(self) -> None:
        self._masks.close()
        if self._reuse.tiers is not None:
            self._reuse.tiers.close()
        super().shutdown()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = self._plain.update(scheduler_output, model_runner_output)
        if outputs is None:
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            if (drafts := drafts_to_check(model_runner_output, self.requests)) is not None:
                self.update_draft_token_ids(drafts)
        self._reuse.metrics.update()
        if self._reuse.tiers is not None:
            self._reuse.tiers.end_step()
        reports = self._prompt_reports
        if reports.expected or reports.steps:
            reports.report(scheduler_output, outputs)
        if self._expired:
            report_expired(self._expired, outputs)
        return outputs

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """As upstream; an answer with `ignore_eos` ends where its grammar does.

        A request for which every token is forbidden ends with an error.
        """
        has_none = new_token_ids[-1] == NO_TOKEN
        known = new_token_ids[:-1] if has_none else new_token_ids
        end = self._masks.get_end(request, known)
        tokens, stopped = super()._update_request_with_output(request, known[:end], is_stale)
        if end is not None and not stopped:
            request.status, stopped = RequestStatus.FINISHED_STOPPED, True
        elif has_none and not stopped:
            request.status, stopped = RequestStatus.FINISHED_ERROR, True
            request.stop_reason = NO_TOKEN_LEFT
        return tokens, stopped

    def _schedule_step(self, throttle_prefills: bool) -> SchedulerOutput:
        if not self._background.is_there(self.requests):
            return self._schedule_among(self._prefilling(), self.running, throttle_prefills)
        front = [request for request in self.running if not is_background(request)]
        prompts = self._prompts_in_front(front)
        taken = self._free_capacity(front, prompts)
        behind = [request for request in self._waiting() if is_background(request)]
        prefilling = self._prefilling()
        unread = [*prefilling, *behind]
        if not taken and self._background.may_prefill(
            unread, beside=bool(front), prompts=bool(prompts)
        ):
            # The longest rest of a prompt first: one chunk should compute much.
            prefilling.sort(key=lambda r: r.num_computed_tokens - r.num_tokens)
            return self._schedule_among(prefilling, self.running, throttle_prefills)
        prefilling = [request for request in prefilling if not is_background(request)]
        return self._schedule_among(prefilling, front, throttle_prefills, behind)

    def _free_capacity(self, front: Sequence[Request], prompts: Sequence[Request]) -> list[Request]:
        """Preempt background requests, newest first, where the foreground lacks a slot or blocks.

        Returns the preempted requests.
        """
        taken: list[Request] = []
        wanted = self._get_blocks(front, prompts[:1])
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

    def _get_blocks(self, decoding: Sequence[Request], prompts: Sequence[Request]) -> int:
        return self._reuse.coordinator.most_blocks(len(decoding), [r.num_tokens for r in prompts])

    def _schedule_among(
        self,
        prefilling: list[Request],
        decoding: Sequence[Request],
        throttle_prefills: bool,
        behind: Sequence[Request] = (),
    ) -> SchedulerOutput:
        """Schedule a chunk of ``prefilling`` or of a waiting request, else a decode step.

        ``decoding`` requests that are owed a decode step get it first. Waiting requests in
        ``behind`` are hidden from the chunk.
        """
        with self._held_back(behind):
            output = None
            if self._may_prefill(prefilling, decoding):
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

    def _may_prefill(self, prefilling: Sequence[Request], decoding: Sequence[Request]) -> bool:
        """Return whether this step can be a chunk.

        Not while ``decoding`` requests have not had their steps since the latest chunk: it bounds
        the time between two tokens of a stream by one chunk.
        """
        if self._decodes_owed > 0 and any(map(can_decode, decoding)):
            return False
        waits = bool(self.waiting) or bool(self.skipped_waiting)
        has_slot = len(self.running) < self.max_num_running_reqs
        return bool(prefilling) or (waits and has_slot)

    def _schedule_prefill(
        self, prefilling: list[Request], throttle_prefills: bool
    ) -> SchedulerOutput:
        """Schedule one chunk: of a running prompt, of a waiting one, or of several whole ones."""
        turn = self._next_turn(prefilling)
        output = self._schedule_turn(turn, throttle_prefills)
        if prefilling and not turn.running and not output.total_num_scheduled_tokens:
            # The waiting prompt lacks KV blocks: continue a running one.
            turn = Turn(prefilling[:1], [], {})
            output = merge_reports(output, self._schedule_turn(turn, throttle_prefills))
        self._count(turn, prefilling, output)
        self._prompt_reports.scheduled(output, self.requests)
        return output

    def _schedule_turn(self, turn: Turn, throttle_prefills: bool) -> SchedulerOutput:
        together = turn.together
        with self._held_back(turn.held_back):
            hidden = [request for request in self.running if request not in turn.running]
            whole = sum(together.values())
            view = StepView(
                # A copy: a preempted prompt leaves the list, but stays in the turn.
                running=list(turn.running),
                hidden=hidden,
                max_running=max(1, len(together)),
                max_tokens=whole or self._chunk_tokens(turn.running, hidden),
                cuts_prompts=not together,
                adds_drafts=False,
            )
            with self._narrowed(view):
                output = super().schedule(throttle_prefills)
        taken = output.num_scheduled_tokens
        assert len(taken) <= 1 or taken.keys() <= together.keys(), (
            "vLLM's Scheduler.schedule ignores max_num_running_reqs, or takes other requests first"
        )
        return output

    def _schedule_decode(self, throttle_prefills: bool) -> SchedulerOutput:
        rows, beginner = Rows(self.running), None
        if self._background.is_there(self.requests):
            rows = self._background.rows(self.running)
            beginner = self._beginner(rows)
        elif hidden := self._prefilling():
            rows = Rows([r for r in self.running if r not in hidden], hidden=hidden)
        left_out: Set[str] = frozenset()
        if self._stages > 1:
            count = len(rows.visible) + (beginner is not None)
            most = decode_share(count, self.max_num_running_reqs, self._stages)
            left_out, is_full = rows_of_other_steps(rows, most)
            beginner = None if is_full else beginner
        if self._drafts is not None:
            step_rows = rows.without(left_out) if left_out else rows
            self._drafts.cut(step_rows, self.kv_cache_manager.block_pool)
        if beginner is None:
            return self._schedule_rows(rows, 0, throttle_prefills, left_out)
        others = [request for request in self._waiting() if request is not beginner]
        with self._held_back(others):
            output = self._schedule_rows(rows, 1, throttle_prefills, left_out)
        if beginner.request_id in output.num_scheduled_tokens:
            self._background.began()
        return output

    def _schedule_rows(
        self, rows: Rows, beginners: int, throttle_prefills: bool, left_out: Set[str]
    ) -> SchedulerOutput:
        """Schedule a decode step of ``rows`` and of ``beginners`` waiting background prompts."""
        visible = rows.visible
        view = StepView(
            running=visible,
            hidden=rows.hidden,
            max_running=len(visible) + beginners,
            adds_drafts=not beginners,
            decode_prefill=True,
            left_out=left_out,
        )
        with self._narrowed(view):
            return super().schedule(throttle_prefills)

    def _beginner(self, rows: Rows) -> Request | None:
        """Return the waiting background request whose prompt gets a padding row of this step.

        None while a foreground prompt is unread, or where its blocks would be too few.
        """
        if not rows.spare or len(self.running) >= self.max_num_running_reqs:
            return None
        waiting = list(self._in_turn())
        if self._prompts_in_front(rows.hidden):
            return None
        refused = self._inadmissible()
        able = (r for r in waiting if can_decode_prefill(r) and r not in refused)
        first = next(filter(self._can_begin, able), None)
        pool = self.kv_cache_manager.block_pool
        if first is None or will_compute_prefix_of(first, self._prefilling(), pool.hash_block_size):
            return None
        fits = pool.get_num_free_blocks() >= self._get_blocks(rows.decoding, [first])
        return first if fits else None

    def _chunk_tokens(self, prefilling: Sequence[Request], others: Sequence[Request]) -> int | None:
        """Return the tokens of the next prompt's next chunk; None: all that fit into a step.

        The prefix hit of a waiting request is not known yet: its first chunk is planned without.
        A background prompt beside a foreground one of ``others`` gets few chunks, so it is not cut.
        """
        request = prefilling[0] if prefilling else None
        if request is None:
            queue = self._select_waiting_queue_for_scheduling()
            request = None if queue is None else queue.peek_request()
        if self._chunks is None or request is None or comes_seldom(request, others):
            return None
        left = self._most_of_a_prompt(request.num_tokens - request.num_computed_tokens)
        return self._chunks.next_chunk(left)


class RblnAsyncScheduler(RblnScheduler, AsyncScheduler):
    """``RblnScheduler`` over vLLM's placeholders for tokens of a step that has not ended.

    A request has one token more than is known, so that its next step can be planned. A stop is
    found one step late: vLLM drops the token of that step.
    """
