"""The rows of a decode step, for the steps after it in which each has one more token."""

from __future__ import annotations

from collections.abc import Sequence

from rbln_backend.core import StepBatch
from rbln_backend.vllm_compat.surface import (
    CachedRequestState,
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    SchedulerOutput,
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
        held = batch.input_batch
        self._held = held
        self._names = list(scheduled.num_scheduled_tokens)
        self._states = [states[name] for name in self._names]
        self._computed = [state.num_computed_tokens for state in self._states]
        self._texts = [states[name].output_token_ids for name in held.req_ids]
        self._processors = [p for p in held.logitsprocs.all if _reads_tokens(p)]
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

    def advance(self, scheduled: SchedulerOutput) -> StepBatch:
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
        return self.batch

    def record(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Append the token of each row."""
        self.tokens = token_ids
        self._recorded += 1
        for text, own in zip(self._texts, token_ids, strict=True):
            text.append(own[0])

    def settle(self) -> None:
        """Bring the tables of the batch up to date."""
        held, count, new = self._held, self.batch.num_reqs, self._recorded
        if new:
            for row, text in enumerate(self._texts):
                end = int(held.num_tokens_no_spec[row])
                held.token_ids_cpu[row, end : end + new] = text[-new:]
        held.num_tokens_no_spec[:count] += new
        held.num_computed_tokens_cpu[:count] += self._advanced
        self._recorded = self._advanced = 0

    def _grow(self, new_blocks: Sequence[tuple[list[int], ...] | None]) -> None:
        for name, state, blocks in zip(self._names, self._states, new_blocks, strict=True):
            if blocks is None:
                continue
            for held, added in zip(state.block_ids, blocks, strict=True):
                held.extend(added)
            row = self._held.req_id_to_index[name]
            self._held.block_table.append_row(blocks, row)
            self.grown.append(row)


def _reads_tokens(processor: object) -> bool:
    """Return whether a logits processor has work where no request joined or left."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    return not isinstance(processor, LogitBiasLogitsProcessor | MinPLogitsProcessor)
