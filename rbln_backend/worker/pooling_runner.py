"""The step loop of a model that pools: scheduler output in, embeddings or scores out."""

from __future__ import annotations

import torch
from torch import Tensor

from rbln_backend.vllm_compat.surface import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from rbln_backend.worker.step.batches import StepWork
from rbln_backend.worker.step.host_pooler import HostPooler
from rbln_backend.worker.step.runner import StepRunner
from rbln_backend.worker.step.token_types import TokenTypes


class PoolingRunner:
    """Runs one chunk of one prompt per step; the last chunk of a prompt pools on the host."""

    def __init__(self, steps: StepRunner, pooler: HostPooler, token_types: TokenTypes) -> None:
        self._steps = steps
        self._pooler = pooler
        self._token_types = token_types

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run the step's graph and pool if it was the prompt's last; never leaves work open."""
        self._pooler.forget(scheduled.finished_req_ids)
        self._token_types.apply(scheduled)
        result = self._steps.run(scheduled)
        if result is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        work, (hidden,), _ = result
        request = self._steps.batches.requests[work.batch.req_ids[0]]
        self._pooler.add(request, hidden[: work.num_tokens], is_last=work.samples)
        pooled: Tensor | None = None
        if work.samples:
            pooled = self._pooler.pool(request, work.batch.get_pooling_metadata())
        return _output(work, pooled)

    @torch.inference_mode()
    def execute_idle(self) -> None:
        """A step without work of this rank; see ``StepRunner.run_idle``."""
        self._steps.run_idle()

    def sample_tokens(self, grammar: GrammarOutput | None) -> None:
        """Nothing: a step has its whole result when ``execute_model`` returns."""


def _output(work: StepWork, pooled: Tensor | None) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=list(work.batch.req_ids),
        req_id_to_index=dict(work.batch.req_id_to_index),
        pooler_output=[pooled],
    )
