"""The step loop of a pipeline stage that is not the last: runs graphs and samples nothing."""

from __future__ import annotations

import torch

from rbln_backend.vllm_compat.surface import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from rbln_backend.worker.step.runner import StepRunner


class RelayRunner:
    """Runs the stage's graph; the next scheduler output has the tokens of the last stage."""

    def __init__(self, steps: StepRunner) -> None:
        self.steps = steps

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run the stage's graph; the executor takes the result from the last stage."""
        self.steps.run(scheduled)
        return EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar: GrammarOutput | None) -> None:
        """Return None: the last stage samples."""
