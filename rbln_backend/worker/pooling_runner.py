"""The step loop of pooling models: scheduler output in, embeddings or scores out."""

from __future__ import annotations

import torch
from torch import Tensor

from rbln_backend.core import StepBatch
from rbln_backend.vllm_compat.surface import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from rbln_backend.worker.step.host_pooler import HostPooler
from rbln_backend.worker.step.runner import StepRunner
from rbln_backend.worker.step.token_types import TokenTypes


class PoolingRunner:
    """Runs one chunk of one prompt per step, and pools on the host after a prompt's last chunk."""

    def __init__(self, steps: StepRunner, pooler: HostPooler, token_types: TokenTypes) -> None:
        self.steps = steps
        self._pooler = pooler
        self._token_types = token_types

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run the step's graph, and pool if it was the prompt's last chunk."""
        self._pooler.remove(scheduled.finished_req_ids)
        self._token_types.apply(scheduled)
        result = self.steps.run(scheduled)
        if result is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch, hidden = result.batch, result.outputs[0]
        request = self.steps.batches.requests[batch.input_batch.req_ids[0]]
        self._pooler.add(request, hidden[: batch.num_tokens], is_last=batch.samples)
        pooled: Tensor | None = None
        if batch.samples:
            pooled = self._pooler.pool(request, batch.input_batch.get_pooling_metadata())
        return _output(batch, pooled)

    def sample_tokens(self, grammar: GrammarOutput | None) -> None:
        """Return None: ``execute_model`` returns the whole result."""


def _output(batch: StepBatch, pooled: Tensor | None) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=list(batch.input_batch.req_ids),
        req_id_to_index=dict(batch.input_batch.req_id_to_index),
        pooler_output=[pooled],
    )
