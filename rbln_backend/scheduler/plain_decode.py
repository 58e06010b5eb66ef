"""Decode steps in which nothing but one more token of each request changes, in a few statements.

vLLM's scheduler looks for the work of every request anew in each step, and builds each output from
everything that could have happened. In most steps of a stream nothing has: the same requests run,
each has one new token, and few need a block. The graph has evicted Python's objects from the
processor's caches, so that every object that a step does not touch saves time.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from rbln_backend.config import NO_TOKEN
from rbln_backend.kv_cache.coordinator import RblnKvCacheManager
from rbln_backend.scheduler.priorities import is_background

BlockIds = tuple[list[int], ...]


class PlainDecode:
    """Schedules and ends plain decode steps, with the outputs that vLLM's scheduler would make.

    A step is plain if all running requests decoded in the previous one, none can be admitted and
    the KV blocks suffice. What ends a request, or needs more than its token, is left to vLLM.
    """

    def __init__(self, scheduler: Scheduler, manager: RblnKvCacheManager) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._coordinator = manager.rbln_coordinator
        self._unit = manager.block_pool.hash_block_size
        self._is_allowed = _is_allowed(scheduler)
        self._requests: list[Request] = []
        """The running requests, if all of them decoded in the latest step; else empty."""
        self._names: list[str] = []
        self._counts: dict[str, int] = {}
        self._updates = False
        """``update`` knows all that these requests need."""
        self._stops: set[int] = set()
        self._left = 0
        """Tokens before one of them reaches its limit."""
        self._reported: tuple[int, int, int] | None = None
        """What statistics that were sent since then say: requests that wait, and free blocks."""

    def note(self, output: SchedulerOutput) -> None:
        """Look at a step that was scheduled in full: the next one may be plain."""
        self._requests, self._reported = [], None
        running, counts = self._scheduler.running, output.num_scheduled_tokens
        if not self._is_allowed or not running or output.scheduled_new_reqs:
            return
        if not len(running) == len(counts) == output.total_num_scheduled_tokens:
            return
        if any(map(_is_special, running)):
            return
        self._requests = list(running)
        self._names = [request.request_id for request in running]
        self._counts = dict.fromkeys(self._names, 1)
        self._updates = _only_tokens(running)
        self._stops = {NO_TOKEN}
        left = []
        for request in running:
            params = request.sampling_params
            assert params is not None
            self._stops.update(params.stop_token_ids or ())
            if params.eos_token_id is not None:
                self._stops.add(params.eos_token_id)
            longest = request.num_prompt_tokens + request.max_tokens
            left.append(min(longest, self._scheduler.max_model_len) - request.num_tokens)
        self._left = min(left) - 1

    def schedule(self) -> SchedulerOutput | None:
        """Return the output of the next step if it is plain, else None, with nothing changed."""
        running, scheduler = self._requests, self._scheduler
        if not running or running != scheduler.running:
            return None
        if (
            scheduler.finished_req_ids
            or scheduler.reset_preempted_req_ids
            or scheduler._pause_state is not PauseState.UNPAUSED
        ):
            return None
        if len(running) < scheduler.max_num_running_reqs and (
            scheduler.waiting or scheduler.skipped_waiting
        ):
            # A request may be admitted.
            return None
        for request in running:
            if len(request._all_token_ids) != request.num_computed_tokens + 1:
                return None
        unit = self._unit
        # Every block and every page begins and ends at a multiple of the unit.
        edges = [r for r in running if not 0 < r.num_computed_tokens % unit < unit - 1]
        if not edges:
            return self._output(running, [None] * len(running))
        wanted = self._coordinator.most_blocks(len(edges), ())
        if wanted > self._manager.block_pool.get_num_free_blocks():
            return None
        taken = {request.request_id: self._allocate(request) for request in edges}
        output = self._output(running, [taken.get(name) for name in self._names])
        output.new_block_ids_to_zero = scheduler._get_new_block_ids_to_zero()
        return output

    def update(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs] | None:
        """Return the outputs of a plain step if no request ends, else None, with nothing changed.

        Only a step with results other than tokens and their log-probabilities is left to vLLM.
        """
        scheduler, running = self._scheduler, self._requests
        if output.num_scheduled_tokens is not self._counts:
            return None
        self._left -= 1
        if self._left <= 0 or not self._updates or running != scheduler.running:
            return None
        if scheduler.grammar_compile_error_reqs or scheduler.finished_req_ids_dict:
            return None
        if (
            result.prompt_logprobs_dict
            or result.pooler_output
            or result.num_nans_in_logits
            or result.kv_connector_output
            or result.ec_connector_output
            or result.cudagraph_stats
            or result.routed_experts is not None
        ):
            return None
        sampled, rows = result.sampled_token_ids, result.req_id_to_index
        tokens = [sampled[rows[name]] for name in self._names]
        for request_tokens in tokens:
            if len(request_tokens) != 1 or request_tokens[0] in self._stops:
                return None
        outputs = self._append(running, tokens)
        if result.logprobs is not None:
            for output_, request in zip(outputs, running, strict=True):
                params = request.sampling_params
                if params is not None and params.num_logprobs is not None:
                    row = rows[output_.request_id]
                    output_.new_logprobs = result.logprobs.slice_request(row, 1)
        blocks = self._manager.block_pool.get_num_free_blocks()
        state = len(scheduler.waiting), len(scheduler.skipped_waiting), blocks
        # All else that they say is of steps that are not plain.
        stats = None if state == self._reported else scheduler.make_stats()
        self._reported = state
        return {running[0].client_index: EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)}

    def _allocate(self, request: Request) -> BlockIds | None:
        """Return the ids of the new blocks of ``request``, by group; None if it needs none."""
        blocks = self._manager.allocate_slots(request, 1, num_lookahead_tokens=0)
        assert blocks is not None, "no step takes more than most_blocks()"
        ids: BlockIds | None = blocks.get_block_ids(allow_none=True)
        return ids

    def _output(self, running: Sequence[Request], blocks: list[BlockIds | None]) -> SchedulerOutput:
        scheduler = self._scheduler
        scheduler.current_step += 1
        computed: list[int] = []
        generated: list[int] = []
        has_grammar = False
        for request in running:
            computed.append(request.num_computed_tokens)
            generated.append(len(request._output_token_ids))
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            if request.structured_output_request is not None:
                has_grammar = True
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=self._names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=computed,
                num_output_tokens=generated,
            ),
            num_scheduled_tokens=self._counts,
            total_num_scheduled_tokens=len(running),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[],
            preempted_req_ids=set(),
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            has_structured_output_requests=has_grammar,
        )

    def _append(
        self, running: Sequence[Request], tokens: Sequence[list[int]]
    ) -> list[EngineCoreOutput]:
        """Append the ``tokens`` of the step to the requests; return the output of each."""
        unit, made = self._unit, []
        for request, own in zip(running, tokens, strict=True):
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(own[0])
            request._all_token_ids.append(own[0])
            if not len(request._all_token_ids) % unit:
                request.update_block_hashes()
            made.append(EngineCoreOutput(request_id=request.request_id, new_token_ids=own))
        return made


def _is_allowed(scheduler: Scheduler) -> bool:
    """Return whether steps of an engine with this configuration can be plain."""
    config = scheduler.vllm_config
    return not (
        config.model_config.runner_type == "pooling"
        or config.model_config.is_multimodal_model
        or config.speculative_config is not None
        or config.parallel_config.pipeline_parallel_size > 1
        or config.observability_config.enable_logging_iteration_details
        or config.scheduler_config.async_scheduling
        or scheduler.connector is not None
        or scheduler.ec_connector is not None
        or scheduler.use_v2_model_runner
        or scheduler.defer_block_free
        or scheduler.enable_kv_cache_events
        or scheduler.enable_return_routed_experts
        or scheduler.perf_metrics is not None
        or scheduler.return_sampling_mask
    )


def _is_special(request: Request) -> bool:
    """Return whether the scheduler treats ``request`` in other ways than one token per step."""
    return bool(
        request.is_prefill_chunk
        or is_background(request)
        or request.num_output_placeholders
        or request.num_stale_output_tokens
        or request.spec_token_ids
        or request.sampling_params is None
    )


def _only_tokens(running: Sequence[Request]) -> bool:
    """Return whether an output of these requests has tokens and log-probabilities alone."""
    return len({request.client_index for request in running}) == 1 and not any(
        request.structured_output_request is not None
        or request.trace_headers is not None
        or (request.sampling_params and request.sampling_params.repetition_detection is not None)
        for request in running
    )
