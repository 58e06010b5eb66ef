"""The step loop: scheduler output in, sampled tokens out.

Charter: only what every generating model does at every step lives here. The way to a graph's
outputs is in ``step.runner``, states and batches are in ``step.batches``, buffers in
``step.inputs``, graphs in ``graphs.dispatch``; features that need more are called from here and
live elsewhere. No configuration flag is read during a step.
"""

from __future__ import annotations

import time
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rbln_backend.compiler.port import Phase
from rbln_backend.vllm_compat.surface import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    GrammarOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    Sampler,
    SchedulerOutput,
)
from rbln_backend.worker.drafts.drafting import Drafting, StepSeconds
from rbln_backend.worker.drafts.verification import Verification
from rbln_backend.worker.sampling.grammar_mask import GrammarMask
from rbln_backend.worker.sampling.prompt_logprobs import PromptLogprobs
from rbln_backend.worker.sampling.sampler import drawing
from rbln_backend.worker.step.batches import StepWork
from rbln_backend.worker.step.runner import StepRunner


class _PendingStep(NamedTuple):
    """Between ``execute_model`` and ``sample_tokens``."""

    scheduled: SchedulerOutput
    work: StepWork
    logits: Tensor
    """[num_reqs, V], or [num_tokens, V] where drafts are checked; padded rows are already cut off.
    Of no use in a chunk that is not the last of its prompt."""
    prompt_logprobs: dict[str, LogprobsTensors | None]
    started: float
    graph_seconds: float


class RblnModelRunner:
    """Runs one static-shape graph per step and samples on the host."""

    def __init__(
        self,
        *,
        steps: StepRunner,
        sampler: Sampler,
        prompt_logprobs: PromptLogprobs,
        grammar_mask: GrammarMask,
        verification: Verification,
        drafting: Drafting,
    ) -> None:
        self._steps = steps
        self._batches = steps.batches
        self._sampler = sampler
        self._verification = verification
        self._drafting = drafting
        self._prompt_logprobs = prompt_logprobs
        self._grammar_mask = grammar_mask
        self._pending: _PendingStep | None = None

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's graph. None means ``sample_tokens`` has the result.

        It has it for every step that ran something: with several steps under way, an engine takes
        results from there alone.
        """
        started = time.perf_counter()
        self._drafting.start_step(scheduled)
        result = self._steps.run(scheduled)
        if result is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        work, (logits, *rest), seconds = result
        self._pending = _PendingStep(
            scheduled,
            work,
            logits=_real_rows(work, logits),
            prompt_logprobs=self._collect_prompt_logprobs(work, rest[0] if rest else None),
            started=started,
            graph_seconds=seconds,
        )
        return None

    @torch.inference_mode()
    def execute_idle(self) -> None:
        """A step without work of this rank; see ``StepRunner.run_idle``."""
        self._steps.run_idle()

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Mask, sample and record; None when the last step ran nothing."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        work, logits = pending.work, pending.logits
        if not work.samples:
            return _without_tokens(work, pending.prompt_logprobs)
        if grammar is not None:
            logits = self._grammar_mask.apply(pending.scheduled, grammar, work.batch, logits)
        token_ids, logprobs = self._sample(work, logits)
        took = StepSeconds(pending.graph_seconds, time.perf_counter() - pending.started)
        self._drafting.end_step(work, token_ids, took)
        return _with_tokens(work, token_ids, logprobs, pending.prompt_logprobs)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What may follow the tokens of the latest step; None where there is nothing to say."""
        return self._drafting.take()

    def _sample(
        self, work: StepWork, logits: Tensor
    ) -> tuple[list[list[int]], LogprobsLists | None]:
        if work.phase is Phase.VERIFY:
            return self._verification.sample(work, logits)
        metadata = work.batch.sampling_metadata
        if work.unfinished:
            metadata = drawing(metadata, [*{*range(work.num_reqs)} - {*work.unfinished}])
        sampled = self._sampler(logits=logits, sampling_metadata=metadata)
        token_ids: list[list[int]] = sampled.sampled_token_ids.tolist()
        for row in work.unfinished:
            token_ids[row] = []
        self._batches.record(work, token_ids)
        logprobs = sampled.logprobs_tensors
        return token_ids, logprobs.tolists() if logprobs is not None else None

    def _collect_prompt_logprobs(
        self, work: StepWork, hidden: Tensor | None
    ) -> dict[str, LogprobsTensors | None]:
        collected: dict[str, LogprobsTensors | None] = {}
        counts = work.counts or [1] * work.num_reqs
        ends = accumulate(counts)
        for request_id, count, end in zip(work.batch.req_ids, counts, ends, strict=True):
            request = self._batches.requests[request_id]
            params = request.sampling_params
            if params is None or params.prompt_logprobs is None:
                continue
            own = None if hidden is None else hidden[end - count :]
            table = self._prompt_logprobs.collect(request, own, count)
            if table is not None:
                collected[request_id] = table
        return collected


def _real_rows(work: StepWork, logits: Tensor) -> Tensor:
    """logits [bucket, V] or [bucket, length, V] without the padding, request by request."""
    if work.phase is not Phase.VERIFY:
        return logits[: work.num_reqs]
    return torch.cat([logits[row, : 1 + len(drafts)] for row, drafts in enumerate(work.drafts)])


def _without_tokens(
    work: StepWork, prompt_logprobs: dict[str, LogprobsTensors | None]
) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=list(work.batch.req_ids),
        req_id_to_index=dict(work.batch.req_id_to_index),
        sampled_token_ids=[[] for _ in range(work.num_reqs)],
        prompt_logprobs_dict=prompt_logprobs,
    )


def _with_tokens(
    work: StepWork,
    token_ids: list[list[int]],
    logprobs: LogprobsLists | None,
    prompt_logprobs: dict[str, LogprobsTensors | None],
) -> ModelRunnerOutput:
    names, places = list(work.batch.req_ids), dict(work.batch.req_id_to_index)
    for reader in work.readers:
        # All of them have the place behind the last, which has no token and no log-probability.
        names.append(reader.req_id)
        places[reader.req_id] = work.num_reqs
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index=places,
        sampled_token_ids=[*token_ids, []] if work.readers else token_ids,
        logprobs=logprobs,
        prompt_logprobs_dict=prompt_logprobs,
    )
