"""The state of each request, and the two persistent batches over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from rbln_backend.config import NO_TOKEN
from rbln_backend.core import Phase, StepBatch
from rbln_backend.scheduler.steps import is_prefill


class RequestBatches:
    """Applies scheduler output to a prefill batch of a few requests and to a decode batch.

    Two batches, so that a prefill between decode steps does not change the decode rows and their
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
        """``max_batch``: most requests of a decode step; ``prompts``: of a prefill step.

        ``samples``: this rank records the tokens that it samples. Other ranks get them from the
        scheduler.
        """
        self.requests: dict[str, CachedRequestState] = {}
        self._prefill: InputBatch = make_batch(prompts)
        self._decode: InputBatch = make_batch(max_batch)
        self._decode_prefill: list[CachedRequestState] = []
        self._samples = samples
        self._drafts: dict[str, Sequence[int]] = {}
        """Drafts that the latest step of a request has checked, where another rank samples."""
        self.plain: PlainRows | None = None
        """The rows of the latest step, if the next one may be plain."""

    def apply(self, scheduled: SchedulerOutput) -> StepBatch | None:
        """Update the states and return the requests of this step, None if there are none."""
        self._end_plain()
        batch = self._apply_changes(scheduled)
        if batch is None or batch.phase is not Phase.DECODE or batch.decode_prefill:
            return batch
        if self._samples:
            self.plain = PlainRows(batch, scheduled, self.requests)
        return batch

    def _end_plain(self) -> None:
        """Bring the tables of the latest plain steps up to date; the next step is not plain."""
        if self.plain is not None:
            self.plain.settle()
            self.plain = None

    def _apply_changes(self, scheduled: SchedulerOutput) -> StepBatch | None:
        for request_id in scheduled.finished_req_ids:
            self.requests.pop(request_id, None)
            self._drafts.pop(request_id, None)
        for new_request in scheduled.scheduled_new_reqs:
            self.requests[new_request.req_id] = _new_state(new_request)
        self._update_cached(scheduled)
        if not self._samples:
            self._drafts |= scheduled.scheduled_spec_decode_tokens
        phase = self._phase(scheduled)
        self._drop_departed(scheduled, phase)
        self._decode_prefill = []
        if phase is None:
            return None
        batch = self._prefill if phase.takes_chunk else self._decode
        self._decode_prefill = self._admit(batch, scheduled)
        drafted = scheduled.scheduled_spec_decode_tokens
        drafts = [drafted.get(i, ()) for i in batch.req_ids] if phase is Phase.VERIFY else ()
        tokens = scheduled.num_scheduled_tokens
        counts = [tokens[i] for i in batch.req_ids] if phase.takes_chunk else ()
        # Rows of a chunk whose prompts continue after it; none in a decode step.
        requests = [self.requests[request_id] for request_id in batch.req_ids]
        unfinished = [
            row
            for row, (request, count) in enumerate(zip(requests, counts, strict=False))
            if request.num_computed_tokens + count < request.num_tokens
        ]
        return StepBatch(
            phase=phase,
            input_batch=batch,
            num_reqs=batch.num_reqs,
            num_tokens=scheduled.total_num_scheduled_tokens,
            samples=not unfinished or len(unfinished) < batch.num_reqs,
            drafts=drafts,
            counts=counts,
            unfinished=unfinished,
            decode_prefill=self._decode_prefill,
        )

    def adapter_ids(self) -> set[int]:
        """Return the adapter ids of the requests in both batches and in the latest step."""
        both = (self._prefill, self._decode)
        adapters = [r.lora_request for r in self._decode_prefill if r.lora_request is not None]
        ids = {adapter.lora_int_id for adapter in adapters}
        return ids.union(*(batch.lora_id_to_lora_request for batch in both))

    def record(self, batch: StepBatch, token_ids: Sequence[Sequence[int]]) -> None:
        if [NO_TOKEN] in token_ids:
            # Its request ends, but a step that is planned already reads it.
            token_ids = [[max(token, 0) for token in sampled] for sampled in token_ids]
        if self.plain is not None and batch is self.plain.batch:
            if all(token_ids):
                self.plain.record(token_ids)
                return
            # The next step differs by more than its tokens.
            self._end_plain()
        rows = batch.input_batch
        for row, (request_id, tokens) in enumerate(zip(rows.req_ids, token_ids, strict=True)):
            request = self.requests[request_id]
            for token in tokens:
                end = request.num_tokens
                rows.token_ids_cpu[row, end] = token
                rows.num_tokens_no_spec[row] = end + 1
                request.output_token_ids.append(token)

    def _update_cached(self, scheduled: SchedulerOutput) -> None:
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            request.num_computed_tokens = cached.num_computed_tokens[index]
            tokens = cached.all_token_ids.get(request_id)
            if tokens is not None:
                # It was preempted: no scheduler output had its latest token, and the scheduler
                # may have dropped one of a step that had not ended.
                request.output_token_ids[:] = tokens[request.num_prompt_tokens :]
            if not self._samples:
                self._append_tokens(request, cached.new_token_ids[index])
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                # Preempted and resumed: it starts over with new blocks.
                assert new_blocks is not None
                request.block_ids = new_blocks
                self._prefill.remove_request(request_id)
                self._decode.remove_request(request_id)
            elif new_blocks is not None:
                for blocks, added in zip(request.block_ids, new_blocks, strict=True):
                    blocks.extend(added)
                for batch in (self._prefill, self._decode):
                    row = batch.req_id_to_index.get(request_id)
                    if row is not None:
                        batch.block_table.append_row(new_blocks, row)

    def _append_tokens(self, request: CachedRequestState, step_tokens: list[int]) -> None:
        """Append the tokens that the last stage has sampled since the request's latest step here.

        ``step_tokens`` are those of the step, from the first one that is not computed. Before it
        are the drafts that were right.
        """
        start = request.num_tokens
        right = request.num_computed_tokens - start
        drafts = self._drafts.pop(request.req_id, ())
        assert right <= len(drafts), "tokens are known by the drafts of the step before"
        known = [*drafts[:right], *step_tokens] if right > 0 else step_tokens[-right:]
        for position, token in enumerate(known, start):
            for batch in (self._prefill, self._decode):
                row = batch.req_id_to_index.get(request.req_id)
                if row is not None:
                    batch.token_ids_cpu[row, position] = token
                    batch.num_tokens_no_spec[row] = position + 1
            request.output_token_ids.append(token)

    def _phase(self, scheduled: SchedulerOutput) -> Phase | None:
        if not scheduled.num_scheduled_tokens:
            return None
        if scheduled.scheduled_spec_decode_tokens:
            return Phase.VERIFY
        num_reqs = len(scheduled.num_scheduled_tokens)
        if num_reqs > 1:
            # A decode step has one token of each request, a chunk has all tokens of its prompts.
            is_decode = scheduled.total_num_scheduled_tokens == num_reqs
            return Phase.DECODE if is_decode else Phase.PREFILL
        (request_id,) = scheduled.num_scheduled_tokens
        request = self.requests[request_id]
        if request.pooling_params is not None:
            return Phase.POOLING
        if is_prefill(request.num_computed_tokens, request.num_tokens):
            return Phase.PREFILL
        return Phase.DECODE

    def _drop_departed(self, scheduled: SchedulerOutput, phase: Phase | None) -> None:
        """Free the rows of finished and preempted requests, and of those that left this batch.

        The batch of the other phase keeps its rows: its requests are not part of this step.
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
        """Add the step's requests to ``batch``; return those that prefill in a decode step.

        These get no row of the batch, so that no sampling state moves between rows.
        """
        prefills = []
        for request_id in scheduled.num_scheduled_tokens:
            request = self.requests[request_id]
            if batch is self._decode and is_prefill(
                request.num_computed_tokens, request.num_tokens
            ):
                prefills.append(request)
                continue
            row = batch.req_id_to_index.get(request_id)
            if row is None:
                batch.add_request(request)
            else:
                batch.num_computed_tokens_cpu[row] = request.num_computed_tokens
        batch.condense()
        batch.refresh_metadata()
        return prefills


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


class PlainRows:
    """The rows of ``batch``, advanced by a token in each plain step: nothing else changed.

    The tables of ``batch`` are behind until ``settle``: no plain step reads them.
    """

    def __init__(
        self, batch: StepBatch, scheduled: SchedulerOutput, states: dict[str, CachedRequestState]
    ) -> None:
        """``batch``: a decode step of ``scheduled``, which gives each request one token."""
        self.batch = batch
        self.grown: list[int] = []
        """Rows that got KV blocks in this step."""
        self.tokens: Sequence[Sequence[int]] = ()
        """[num_reqs, 1]: the latest sampled tokens; empty before the first."""
        rows = batch.input_batch
        self._held = rows
        self._names = list(scheduled.num_scheduled_tokens)
        self._states = [states[name] for name in self._names]
        self._computed = [state.num_computed_tokens for state in self._states]
        self._texts = [states[name].output_token_ids for name in rows.req_ids]
        # Those with work where no request joins or leaves.
        self._processors = [
            processor
            for processor in rows.logitsprocs.all
            if not isinstance(processor, LogitBiasLogitsProcessor | MinPLogitsProcessor)
            and not (isinstance(processor, MinTokensLogitsProcessor) and not processor.min_toks)
        ]
        self._recorded = self._advanced = 0

    def follows(self, scheduled: SchedulerOutput) -> bool:
        """Return whether ``scheduled`` has the same requests, each with its next token."""
        cached = scheduled.scheduled_cached_reqs
        return (
            cached.req_ids == self._names
            and scheduled.total_num_scheduled_tokens == len(self._names)
            and len(scheduled.num_scheduled_tokens) == len(self._names)
            and bool(self.tokens)
            and cached.num_computed_tokens == [count + 1 for count in self._computed]
            and not (
                scheduled.finished_req_ids
                or scheduled.preempted_req_ids
                or cached.resumed_req_ids
                or scheduled.scheduled_spec_decode_tokens
                or scheduled.scheduled_new_reqs
            )
        )

    def advance(self, scheduled: SchedulerOutput) -> None:
        """Apply a step that ``follows``."""
        cached = scheduled.scheduled_cached_reqs
        self._computed = cached.num_computed_tokens
        for state, count in zip(self._states, self._computed, strict=True):
            state.num_computed_tokens = count
        self._advanced += 1
        self.grown = []
        if any(cached.new_block_ids):
            self._grow(cached.new_block_ids)
        for processor in self._processors:
            processor.update_state(None)

    def record(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.tokens = token_ids
        self._recorded += 1
        for text, tokens in zip(self._texts, token_ids, strict=True):
            text.append(tokens[0])

    def settle(self) -> None:
        """Bring the tables of the batch up to date."""
        rows, count, new = self._held, self.batch.num_reqs, self._recorded
        if new:
            for row, text in enumerate(self._texts):
                end = int(rows.num_tokens_no_spec[row])
                rows.token_ids_cpu[row, end : end + new] = text[-new:]
        rows.num_tokens_no_spec[:count] += new
        rows.num_computed_tokens_cpu[:count] += self._advanced
        self._recorded = self._advanced = 0

    def _grow(self, new_blocks: Sequence[tuple[list[int], ...] | None]) -> None:
        for name, state, blocks in zip(self._names, self._states, new_blocks, strict=True):
            if blocks is None:
                continue
            for group, added in zip(state.block_ids, blocks, strict=True):
                group.extend(added)
            row = self._held.req_id_to_index[name]
            self._held.block_table.append_row(blocks, row)
            self.grown.append(row)


class IsolatedInputBatch(InputBatch):
    """vLLM's input batch, with every row cleared before it is filled and after it is left.

    Upstream writes a row's mask of allowed tokens, bad words, generator, prompt embeddings and
    thinking budget only for requests that have them, and does not clear the source row of a move.
    A later request in that row would be sampled with the state of an earlier one.
    """

    def _register_add_request(self, request: CachedRequestState) -> int:
        """Return the row that ``add_request`` is about to fill, cleared."""
        row: int = super()._register_add_request(request)
        self._clear_row(row)
        return row

    def remove_request(self, req_id: str) -> int | None:
        row: int | None = super().remove_request(req_id)
        if row is not None:
            self._clear_row(row)
            if self.thinking_budget_state_holder is not None:
                # Before another request moves into the row: upstream's holder would keep the budget
                # for a request without one.
                self.thinking_budget_state_holder.sync_batch(
                    BatchUpdate(batch_size=self.num_reqs, removed=(row,), added=(), moved=())
                )
        return row

    def condense(self) -> None:
        rows = len(self._req_ids)
        super().condense()
        for row in range(self.num_reqs, rows):
            self._clear_row(row)

    def swap_states(self, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        if mask is None:
            super().swap_states(i1, i2)
            return
        first = mask[i1].clone()
        super().swap_states(i1, i2)
        # Upstream's exchange of two views writes the second row to both.
        mask[i2] = first

    def _clear_row(self, row: int) -> None:
        """Drop every field that upstream writes only for some of the requests."""
        self.generators.pop(row, None)
        self.bad_words_token_ids.pop(row, None)
        self.req_prompt_embeds.pop(row, None)
        self.request_lora_mapping[row] = 0
        # Penalties read the prompt tokens of requests with prompt embeddings as well.
        self.token_ids_cpu[row] = 0
        self.is_token_ids[row] = False
        if self.allowed_token_ids_mask_cpu_tensor is not None:
            self.allowed_token_ids_mask_cpu_tensor[row] = False
