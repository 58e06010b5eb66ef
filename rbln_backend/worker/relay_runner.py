"""The step loop of a pipeline stage that is not the last: it computes and hands on."""

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
    """Tokens are sampled by the last stage; the scheduler tells them with the next step."""

    def __init__(self, steps: StepRunner) -> None:
        self._steps = steps

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run the stage's graph; whoever asks for a step's result asks the last stage."""
        self._steps.run(scheduled)
        return EMPTY_MODEL_RUNNER_OUTPUT

    @torch.inference_mode()
    def execute_idle(self) -> None:
        """A step without work of this rank; see ``StepRunner.run_idle``."""
        self._steps.run_idle()

    def sample_tokens(self, grammar: GrammarOutput | None) -> None:
        """The last stage does."""
