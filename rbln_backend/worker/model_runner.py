"""The step loop of generating models: scheduler output in, sampled tokens out.

Only steps that every generating model takes belong here; features have their own modules, which
this one calls. ``rbln_backend.core`` describes a step. No configuration is read during a step.
"""

from __future__ import annotations

import time
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rbln_backend.core import Phase, StepBatch, StepOutputs
from rbln_backend.scheduler.output import with_drafts
from rbln_backend.vllm_compat.surface import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    GrammarOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplingMetadata,
    SchedulerOutput,
)
from rbln_backend.worker.drafts.drafting import Drafting
from rbln_backend.worker.drafts.verification import Verification
from rbln_backend.worker.sampling.device_sampler import DeviceSampler
from rbln_backend.worker.sampling.grammar_mask import GrammarMask
from rbln_backend.worker.sampling.picks import TokenPicks
from rbln_backend.worker.sampling.prompt_logprobs import PromptLogprobs
from rbln_backend.worker.sampling.sampler import RowSampler, with_generators
from rbln_backend.worker.step.runner import StepRunner


class _PendingStep(NamedTuple):
    """A step after ``execute_model`` and before ``sample_tokens``."""

    scheduled: SchedulerOutput
    batch: StepBatch
    outputs: StepOutputs
    """Not read for a chunk that ends no prompt."""
    prompt_logprobs: dict[str, LogprobsTensors | None]
    started: float


class RblnModelRunner:
    """Runs one static-shape graph per step and samples on the host."""

    def __init__(
        self,
        *,
        steps: StepRunner,
        sampler: RowSampler,
        picks: TokenPicks | None,
        draws: DeviceSampler | None,
        prompt_logprobs: PromptLogprobs,
        grammar_mask: GrammarMask,
        verification: Verification,
        drafting: Drafting,
    ) -> None:
        """``picks``: the tokens of greedy steps; ``draws``: those of sampled ones. None where the
        sampler takes them.
        """
        self.steps = steps
        self._batches = steps.batches
        self._sampler = sampler
        self._picks, self._draws = picks, draws
        self._verification = verification
        self._drafting = drafting
        self._prompt_logprobs = prompt_logprobs
        self._grammar_mask = grammar_mask
        self._pending: _PendingStep | None = None
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        """Names and rows of the requests of the latest step, as results have them."""

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's graph; return None if it ran, because ``sample_tokens`` has the result.

        An engine with several steps in flight takes results from ``sample_tokens`` alone.
        """
        started = time.perf_counter()
        self._drafting.start_step(scheduled)
        result = self.steps.run_plain(scheduled)
        if result is None:
            return self._execute_in_full(scheduled, started)
        # No prompt ends in a plain step.
        batch, outputs = result
        self._pending = _PendingStep(scheduled, batch, outputs, {}, started)
        return None

    @torch.inference_mode()
    def _execute_in_full(
        self, scheduled: SchedulerOutput, started: float
    ) -> ModelRunnerOutput | None:
        result = self.steps.run(scheduled)
        if result is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch, outputs = result
        self._take_names(batch)
        self._pending = _PendingStep(
            scheduled,
            batch,
            outputs,
            prompt_logprobs=self._collect_prompt_logprobs(batch, outputs),
            started=started,
        )
        return None

    def synchronize(self) -> None:
        """Do nothing: the device runs no step between two calls."""

    def sample_tokens(
        self, grammar: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Mask, sample and record; return None when the last step ran nothing."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        batch, logprobs = pending.batch, None
        if not batch.samples:
            self._drafting.end_chunk(batch, pending.outputs)
            return self._reply([[] for _ in range(batch.num_reqs)], None, pending)
        token_ids = None if grammar is not None else self._take_picked(batch, pending.outputs)
        known = token_ids
        if token_ids is None or known is None:
            token_ids, logprobs = self._sample_logits(pending, grammar)
            # A request that gets ``NO_TOKEN`` ends, but a draft model may still read it.
            known = [[max(token, 0) for token in own] for own in token_ids]
        seconds = time.perf_counter() - pending.started
        self._drafting.end_step(batch, pending.outputs, known, seconds)
        return self._reply(token_ids, logprobs, pending)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return drafts for the next step; None without speculation or sampled tokens."""
        return self._drafting.take()

    def _take_picked(self, batch: StepBatch, outputs: StepOutputs) -> list[list[int]] | None:
        """Record and return picked or drawn tokens; None if the logits of any are needed here."""
        if batch.phase is Phase.VERIFY:
            return self._verification.take_picked(batch, outputs)
        metadata = batch.input_batch.sampling_metadata
        if self._picks is not None and self._sampler.takes_largest(metadata):
            token_ids = self._picks(outputs, batch.num_reqs)
        elif self._draws is not None and self._is_drawn(self._draws, metadata):
            token_ids = self._draws.draw(outputs, batch.num_reqs, metadata)
        else:
            return None
        for row in batch.unfinished:
            token_ids[row] = []
        self._batches.record(batch, token_ids)
        return token_ids

    def _is_drawn(self, draws: DeviceSampler, metadata: SamplingMetadata) -> bool:
        return self._sampler.takes_logits_alone(metadata) and draws.takes(metadata)

    @torch.inference_mode()
    def _sample_logits(
        self, step: _PendingStep, grammar: GrammarOutput | None
    ) -> tuple[list[list[int]], LogprobsLists | None]:
        batch = step.batch
        logits = _real_rows(batch, step.outputs[0])
        if grammar is not None:
            logits = self._grammar_mask.apply(step.scheduled, grammar, batch.input_batch, logits)
        return self._sample(batch, logits)

    def _sample(
        self, batch: StepBatch, logits: Tensor
    ) -> tuple[list[list[int]], LogprobsLists | None]:
        """Return the tokens of each request, none for prompts that continue."""
        if batch.phase is Phase.VERIFY:
            return self._verification.sample(batch, logits)
        metadata = batch.input_batch.sampling_metadata
        if batch.unfinished:
            metadata = with_generators(metadata, [*{*range(batch.num_reqs)} - {*batch.unfinished}])
        sampled = self._sampler(logits=logits, sampling_metadata=metadata)
        token_ids: list[list[int]] = sampled.sampled_token_ids.tolist()
        for row in batch.unfinished:
            token_ids[row] = []
        self._batches.record(batch, token_ids)
        logprobs = sampled.logprobs_tensors
        return token_ids, logprobs.tolists() if logprobs is not None else None

    def _collect_prompt_logprobs(
        self, batch: StepBatch, outputs: StepOutputs
    ) -> dict[str, LogprobsTensors | None]:
        collected: dict[str, LogprobsTensors | None] = {}
        counts = batch.counts or [1] * batch.num_reqs
        ends = accumulate(counts)
        for request_id, count, end in zip(batch.input_batch.req_ids, counts, ends, strict=True):
            request = self._batches.requests[request_id]
            params = request.sampling_params
            if params is None or params.prompt_logprobs is None:
                continue
            own = outputs[1][end - count :] if batch.phase is Phase.PREFILL else None
            table = self._prompt_logprobs.collect(request, own, count)
            if table is not None:
                collected[request_id] = table
        return collected

    def _take_names(self, batch: StepBatch) -> None:
        """Set the names and rows of the results of ``batch`` and of plain steps after it."""
        self._names = list(batch.input_batch.req_ids)
        self._rows = dict(batch.input_batch.req_id_to_index)
        for request in batch.decode_prefill:
            # All of them share the row behind the last, which has no token and no log-probability.
            self._names.append(request.req_id)
            self._rows[request.req_id] = batch.num_reqs

    def _reply(
        self, token_ids: list[list[int]], logprobs: LogprobsLists | None, step: _PendingStep
    ) -> ModelRunnerOutput:
        output = ModelRunnerOutput(
            req_ids=self._names,
            req_id_to_index=self._rows,
            sampled_token_ids=[*token_ids, []] if step.batch.decode_prefill else token_ids,
            logprobs=logprobs,
            prompt_logprobs_dict=step.prompt_logprobs,
        )
        return with_drafts(output, self._drafting.take()) if self._drafting.by_step else output


def _real_rows(batch: StepBatch, logits: Tensor) -> Tensor:
    """Return logits [bucket, V] or [bucket, length, V] without padding, request by request."""
    if batch.phase is not Phase.VERIFY:
        return logits if logits.shape[0] == batch.num_reqs else logits[: batch.num_reqs]
    return torch.cat([logits[row, : 1 + len(drafts)] for row, drafts in enumerate(batch.drafts)])
