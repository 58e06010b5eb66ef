"""What persists per request, and the two persistent batches built from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rbln_backend.bucketing.chunk_plan import room_of
from rbln_backend.compiler.port import Phase
from rbln_backend.scheduler.constraints import is_prefill
from rbln_backend.vllm_compat.surface import (
    CachedRequestState,
    InputBatch,
    NewRequestData,
    SchedulerOutput,
)
from rbln_backend.worker.sampling.input_batch import IsolatedInputBatch


@dataclass(frozen=True)
class StepWork:
    """The requests of one step, in batch order; ``batch`` is the persistent batch they are in."""

    phase: Phase
    batch: InputBatch
    num_reqs: int
    num_tokens: int
    """Tokens of the step: those of a chunk in prefill, ``num_rows`` in decode, with drafts more."""
    samples: bool
    """False for a chunk that is the last of no prompt: it produces no token."""
    drafts: Sequence[Sequence[int]] = ()
    """The drafts of each request, in batch order; empty where none are checked."""
    counts: Sequence[int] = ()
    """The tokens of each request, in batch order, in prefill."""
    unfinished: Sequence[int] = ()
    """Rows of a chunk that samples whose prompts go on after it; nothing is sampled for them."""
    readers: Sequence[CachedRequestState] = ()
    """Further requests, in rows behind the batch's: each reads a token of its prompt there, and
    nothing is sampled for it."""

    @property
    def num_rows(self) -> int:
        """Requests of the step."""
        return self.num_reqs + len(self.readers)

    @property
    def length(self) -> int:
        """Tokens of the request that has most drafts, its latest one included."""
        return 1 + max(map(len, self.drafts), default=0)

    @property
    def size(self) -> int:
        """What the bucket is chosen by: tokens in prefill, requests in decode."""
        takes_chunk = self.phase.takes_chunk
        return room_of(self.num_tokens, self.num_reqs) if takes_chunk else self.num_rows


class RequestBatches:
    """Applies scheduler output; a prefill batch of a few and a decode batch.

    Two batches, so that a prefill between decode steps does not disturb the decode rows and their
    sampling state.
    """

    def __init__(
        self,
        make_batch: Callable[[int], IsolatedInputBatch],
        max_batch: int,
        prompts: int = 1,
        *,
        samples: bool = True,
    ) -> None:
        """``max_batch``: requests of the largest decode step; ``prompts``: of a prefill step.

        ``samples``: this rank records the tokens that it samples; otherwise it learns of them from
        the scheduler.
        """
        self.requests: dict[str, CachedRequestState] = {}
        self._prefill: InputBatch = make_batch(prompts)
        self._decode: InputBatch = make_batch(max_batch)
        self._readers: list[CachedRequestState] = []
        self._records = samples

    def apply(self, scheduled: SchedulerOutput) -> StepWork | None:
        """Update the states and return this step's work, or None when nothing is scheduled."""
        for request_id in scheduled.finished_req_ids:
            self.requests.pop(request_id, None)
        for new_request in scheduled.scheduled_new_reqs:
            self.requests[new_request.req_id] = _new_state(new_request)
        self._update_cached(scheduled)
        phase = self._phase(scheduled)
        self._drop_departed(scheduled, phase)
        self._readers = []
        if phase is None:
            return None
        batch = self._prefill if phase.takes_chunk else self._decode
        self._readers = self._admit(batch, scheduled)
        num_tokens = scheduled.total_num_scheduled_tokens
        drafted = scheduled.scheduled_spec_decode_tokens
        drafts = [drafted.get(i, ()) for i in batch.req_ids] if phase is Phase.VERIFY else ()
        tokens = scheduled.num_scheduled_tokens
        counts = [tokens[i] for i in batch.req_ids] if phase.takes_chunk else ()
        unfinished = self._unfinished(batch, counts)
        samples = not unfinished or len(unfinished) < batch.num_reqs
        work = (phase, batch, batch.num_reqs, num_tokens, samples, drafts, counts)
        return StepWork(*work, unfinished, self._readers)

    def adapter_ids(self) -> set[int]:
        """The adapters of the requests that are in a batch, or read beside one."""
        both = (self._prefill, self._decode)
        adapters = [r.lora_request for r in self._readers if r.lora_request is not None]
        ids = {adapter.lora_int_id for adapter in adapters}
        return ids.union(*(batch.lora_id_to_lora_request for batch in both))

    def record(self, work: StepWork, token_ids: Sequence[Sequence[int]]) -> None:
        """Append the tokens sampled for each request to the requests of the step."""
        batch = work.batch
        for row, (request_id, tokens) in enumerate(zip(batch.req_ids, token_ids, strict=True)):
            request = self.requests[request_id]
            for token in tokens:
                end = request.num_tokens
                batch.token_ids_cpu[row, end] = token
                batch.num_tokens_no_spec[row] = end + 1
                request.output_token_ids.append(token)

    def _update_cached(self, scheduled: SchedulerOutput) -> None:
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            request.num_computed_tokens = cached.num_computed_tokens[index]
            if not self._records:
                tokens = cached.all_token_ids.get(request_id)
                if tokens is not None:
                    # It was preempted; its latest token has not come with any step.
                    request.output_token_ids[:] = tokens[request.num_prompt_tokens :]
                self._learn(request, cached.new_token_ids[index])
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                # Preempted and resumed: it starts over with fresh blocks.
                assert new_blocks is not None
                request.block_ids = new_blocks
                self._prefill.remove_request(request_id)
                self._decode.remove_request(request_id)
            elif new_blocks is not None:
                self._append_blocks(request, new_blocks)

    def _learn(self, request: CachedRequestState, step_tokens: list[int]) -> None:
        """Append what the last stage has sampled since this rank last saw the request.

        ``step_tokens`` are those of the step, from the first one that is not computed.
        """
        end = request.num_computed_tokens + len(step_tokens)
        for place in range(request.num_tokens, end):
            token = step_tokens[place - request.num_computed_tokens]
            for batch in (self._prefill, self._decode):
                row = batch.req_id_to_index.get(request.req_id)
                if row is not None:
                    batch.token_ids_cpu[row, place] = token
                    batch.num_tokens_no_spec[row] = place + 1
            request.output_token_ids.append(token)

    def _append_blocks(
        self, request: CachedRequestState, new_blocks: tuple[list[int], ...]
    ) -> None:
        for held, added in zip(request.block_ids, new_blocks, strict=True):
            held.extend(added)
        for batch in (self._prefill, self._decode):
            row = batch.req_id_to_index.get(request.req_id)
            if row is not None:
                batch.block_table.append_row(new_blocks, row)

    def _phase(self, scheduled: SchedulerOutput) -> Phase | None:
        if not scheduled.num_scheduled_tokens:
            return None
        if scheduled.scheduled_spec_decode_tokens:
            return Phase.VERIFY
        several = len(scheduled.num_scheduled_tokens)
        if several > 1:
            # A decode step has a token of each, a chunk of several prompts has all of theirs.
            is_decode = scheduled.total_num_scheduled_tokens == several
            return Phase.DECODE if is_decode else Phase.PREFILL
        (request_id,) = scheduled.num_scheduled_tokens
        request = self.requests[request_id]
        if request.pooling_params is not None:
            return Phase.POOLING
        if is_prefill(request.num_computed_tokens, request.num_tokens):
            return Phase.PREFILL
        return Phase.DECODE

    def _drop_departed(self, scheduled: SchedulerOutput, phase: Phase | None) -> None:
        """Free rows of finished and preempted requests, and of those that left this phase's batch.

        The other phase's batch keeps its rows: its requests merely sit this step out.
        """
        takes_chunk = None if phase is None else phase.takes_chunk
        gone = scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())
        for batch, is_prefill_batch in ((self._prefill, True), (self._decode, False)):
            rows = batch.req_id_to_index.keys()
            departed = rows & gone if gone else set()
            if takes_chunk is is_prefill_batch:
                departed |= rows - scheduled.num_scheduled_tokens.keys()
            for request_id in departed:
                batch.remove_request(request_id)

    def _admit(self, batch: InputBatch, scheduled: SchedulerOutput) -> list[CachedRequestState]:
        """Put the step's requests into ``batch``; returns those that only read in a decode step.

        They have no row of the batch, so that no sampling state of theirs or of others moves.
        """
        readers = []
        for request_id in scheduled.num_scheduled_tokens:
            request = self.requests[request_id]
            if batch is self._decode and is_prefill(
                request.num_computed_tokens, request.num_tokens
            ):
                readers.append(request)
                continue
            row = batch.req_id_to_index.get(request_id)
            if row is None:
                batch.add_request(request)
            else:
                batch.num_computed_tokens_cpu[row] = request.num_computed_tokens
        batch.condense()
        batch.refresh_metadata()
        return readers

    def _unfinished(self, batch: InputBatch, counts: Sequence[int]) -> list[int]:
        """Return the rows of a chunk whose prompts go on after it; none in a decode step."""
        rows = zip(batch.req_ids, counts, strict=False)
        return [
            row
            for row, (request_id, count) in enumerate(rows)
            if (request := self.requests[request_id]).num_computed_tokens + count
            < request.num_tokens
        ]


def _new_state(data: NewRequestData) -> CachedRequestState:
    params = data.sampling_params
    generator = None
    if params is not None and params.seed is not None:
        generator = torch.Generator(device="cpu")
        generator.manual_seed(params.seed)
    return CachedRequestState(
        req_id=data.req_id,
        prompt_token_ids=data.prompt_token_ids,
        prompt_embeds=data.prompt_embeds,
        mm_features=data.mm_features,
        sampling_params=params,
        pooling_params=data.pooling_params,
        generator=generator,
        block_ids=data.block_ids,
        num_computed_tokens=data.num_computed_tokens,
        output_token_ids=[],
        lora_request=data.lora_request,
    )
