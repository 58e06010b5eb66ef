"""The executors: of one worker in the engine's process, and of ranks that are processes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture, UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


StepOutput: TypeAlias = "ModelRunnerOutput | None"


class DirectExecutor(UniProcExecutor):
    """vLLM's executor for one process; the two calls of a step go to the worker directly.

    vLLM's look up the method by name, in each step with cold caches.
    """

    # Upstream's overloads leave out the None that its engine expects.
    def execute_model(  # type: ignore[override]
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> StepOutput | Future[StepOutput]:
        worker: Any = self.driver_worker
        if not scheduler_output.scheduled_new_reqs:
            # Its wrapper looks for the media of new requests alone.
            worker = worker.worker
        output: StepOutput = worker.execute_model(scheduler_output)
        if not non_block:
            return output
        return _RAN if output is None else _done(output)

    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> StepOutput | Future[StepOutput]:
        worker: Any = self.driver_worker
        try:
            output: StepOutput | AsyncModelRunnerOutput = worker.worker.sample_tokens(
                grammar_output
            )
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


_RAN = _done(None)
"""The result of steps that sample later: a future with its lock costs a step ten calls."""


class RanksExecutor(MultiprocExecutor):
    """vLLM's executor for several processes; pipeline stages send drafts with each result."""

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """As vLLM's; None with pipeline stages, where drafts come with each step's result."""
        if self.parallel_config.pipeline_parallel_size > 1:
            return None
        drafts: DraftTokenIds | None = super().take_draft_token_ids()
        return drafts
