"""The step loop of an engine with asynchronous scheduling."""

from __future__ import annotations

from typing import cast

from rbln_backend.vllm_compat.surface import (
    AsyncModelRunnerOutput,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from rbln_backend.worker.model_runner import RblnModelRunner
from rbln_backend.worker.overlap.step_in_flight import StepInFlight


class AsyncModelRunner(RblnModelRunner):
    """Returns from a step while the device runs it, and ends it before the next one begins.

    The scheduler has planned the next step without the tokens of this one. Here they are known:
    they are read, or sampled, and recorded before the next step is applied. So sampling, seeds,
    penalties and grammars are those of an engine without asynchronous scheduling. A graph's
    outputs are read before it runs again, which overwrites them.
    """

    _in_flight: StepInFlight | None = None

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """As ``RblnModelRunner.execute_model``, after the end of the step before."""
        self.synchronize()
        return super().execute_model(scheduled)

    def sample_tokens(
        self, grammar: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Return the step's result to read later; None when the last step ran nothing."""
        if self._pending is None:
            return None
        self._in_flight = StepInFlight(lambda: self._end(grammar))
        return self._in_flight

    def synchronize(self) -> None:
        """Wait for the step that the device runs, and record its tokens."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            step.get_output()

    def _end(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        self.steps.wait()
        return cast("ModelRunnerOutput", super().sample_tokens(grammar))
