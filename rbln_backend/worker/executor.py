"""The executor of an engine whose one worker is in its process."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias, cast

from vllm.v1.executor.uniproc_executor import AsyncOutputFuture, UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput

if TYPE_CHECKING:
    # The HTTP process imports this module for the name of the class, and must not import layers.
    from rbln_backend.vllm_compat.surface import (
        GrammarOutput,
        ModelRunnerOutput,
        SchedulerOutput,
    )
    from rbln_backend.worker.worker import RblnWorker

StepOutput: TypeAlias = "ModelRunnerOutput | None"


class DirectExecutor(UniProcExecutor):
    """vLLM's executor for one process; the two calls of a step go to the worker directly.

    vLLM's look up the method by name, in each step with cold caches.
    """

    # Upstream's overloads leave out the None that its engine expects.
    def execute_model(  # type: ignore[override]
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> StepOutput | Future[StepOutput]:
        output = cast("StepOutput", self.driver_worker.execute_model(scheduler_output))
        return _done(output) if non_block else output

    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> StepOutput | Future[StepOutput]:
        try:
            output = cast("RblnWorker", self.driver_worker.worker).sample_tokens(grammar_output)
        except Exception as error:
            if not non_block:
                raise
            failed: Future[StepOutput] = Future()
            failed.set_exception(error)
            return failed
        if isinstance(output, AsyncModelRunnerOutput):
            if non_block:
                return AsyncOutputFuture(output, single_value=True)
            return output.get_output()
        return _done(output) if non_block else output


def _done(output: StepOutput) -> Future[StepOutput]:
    future: Future[StepOutput] = Future()
    future.set_result(output)
    return future
