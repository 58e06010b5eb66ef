"""The step loop: scheduler output in, sampled tokens out.

Charter: only what every model does at every step lives here. States and batches are in
``request_batches``, buffers in ``step_inputs``, graphs in ``graph_dispatch``; features that need
more are called from here and live elsewhere. No configuration flag is read during a step.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rbln_backend.compiler.port import Phase
from rbln_backend.kv_cache.tensors import KvCaches
from rbln_backend.vllm_compat.surface import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    GrammarOutput,
    LogprobsTensors,
    ModelRunnerOutput,
    Sampler,
    SamplerOutput,
    SchedulerOutput,
    apply_grammar_bitmask,
)
from rbln_backend.worker.graph_set import GraphSet, StepGraph
from rbln_backend.worker.prompt_logprobs import PromptLogprobs
from rbln_backend.worker.request_batches import RequestBatches, StepWork
from rbln_backend.worker.step_inputs import StepInputs
from rbln_backend.worker.step_metrics import StepMetrics


class _PendingStep(NamedTuple):
    """Between ``execute_model`` and ``sample_tokens``."""

    scheduled: SchedulerOutput
    work: StepWork
    logits: Tensor
    """[num_reqs, V]; the padded rows are already cut off."""
    prompt_logprobs: dict[str, LogprobsTensors | None]


class RblnModelRunner:
    """Runs one static-shape graph per step and samples on the host."""

    def __init__(
        self,
        *,
        batches: RequestBatches,
        graphs: GraphSet,
        sampler: Sampler,
        prompt_logprobs: PromptLogprobs,
        kv_caches: KvCaches,
        metrics: StepMetrics,
    ) -> None:
        self._batches = batches
        self._graphs = graphs
        self._sampler = sampler
        self._prompt_logprobs = prompt_logprobs
        self._kv_caches = kv_caches
        self._metrics = metrics
        self._pending: _PendingStep | None = None

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's graph. None means ``sample_tokens`` has the result."""
        self._prepare_blocks(scheduled)
        work = self._batches.apply(scheduled)
        if work is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step = self._graphs.select(work.phase, work.size)
        _fill(step.inputs, work)
        logits, hidden = self._run(step, work)
        prompt_logprobs = self._collect_prompt_logprobs(work, hidden)
        if not work.samples:
            return _without_tokens(work, prompt_logprobs)
        self._pending = _PendingStep(scheduled, work, logits[: work.num_reqs], prompt_logprobs)
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Mask, sample and record; None when the last step had nothing to sample."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        work, logits = pending.work, pending.logits
        if grammar is not None:
            # The mask is applied on the host, in float32.
            logits = logits.to(torch.float32)
            apply_grammar_bitmask(pending.scheduled, grammar, work.batch, logits)
        sampled = self._sampler(logits=logits, sampling_metadata=work.batch.sampling_metadata)
        token_ids: list[list[int]] = sampled.sampled_token_ids.tolist()
        self._batches.record(work, token_ids)
        return _with_tokens(work, token_ids, sampled, pending.prompt_logprobs)

    def _prepare_blocks(self, scheduled: SchedulerOutput) -> None:
        if scheduled.new_block_ids_to_zero:
            self._kv_caches.zero_blocks(scheduled.new_block_ids_to_zero)
        if scheduled.kv_cache_block_copies:
            copies = [(c.src_block_id, c.dst_block_id) for c in scheduled.kv_cache_block_copies]
            self._kv_caches.copy_blocks(copies)

    def _run(self, step: StepGraph, work: StepWork) -> tuple[Tensor, Tensor | None]:
        started = time.perf_counter()
        outputs = step.graph.run()
        seconds = time.perf_counter() - started
        self._metrics.record(step.spec, work.num_reqs, work.num_tokens, seconds)
        return outputs[0], outputs[1] if len(outputs) > 1 else None

    def _collect_prompt_logprobs(
        self, work: StepWork, hidden: Tensor | None
    ) -> dict[str, LogprobsTensors | None]:
        tokens_per_request = work.num_tokens // work.num_reqs
        collected: dict[str, LogprobsTensors | None] = {}
        for request_id in work.batch.req_ids:
            request = self._batches.requests[request_id]
            table = self._prompt_logprobs.collect(request, hidden, tokens_per_request)
            if table is not None:
                collected[request_id] = table
        return collected


def _fill(inputs: StepInputs, work: StepWork) -> None:
    batch, count = work.batch, work.num_reqs
    block_rows = batch.block_table[0].get_numpy_array()
    if work.phase is Phase.PREFILL:
        start = int(batch.num_computed_tokens_cpu[0])
        tokens = batch.token_ids_cpu[0, start : start + work.num_tokens]
        inputs.fill_prefill(tokens, start, block_rows[0])
        return
    num_computed = batch.num_computed_tokens_cpu[:count]
    tokens = batch.token_ids_cpu[np.arange(count), num_computed]
    inputs.fill_decode(tokens, num_computed, block_rows[:count])


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
    sampled: SamplerOutput,
    prompt_logprobs: dict[str, LogprobsTensors | None],
) -> ModelRunnerOutput:
    logprobs = sampled.logprobs_tensors
    return ModelRunnerOutput(
        req_ids=list(work.batch.req_ids),
        req_id_to_index=dict(work.batch.req_id_to_index),
        sampled_token_ids=token_ids,
        logprobs=logprobs.tolists() if logprobs is not None else None,
        prompt_logprobs_dict=prompt_logprobs,
    )
