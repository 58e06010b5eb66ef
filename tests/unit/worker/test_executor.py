"""The futures that the executor of one process gives vLLM's engine."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from vllm.v1.worker.worker_base import WorkerWrapperBase

from rbln_backend.vllm_compat.surface import AsyncModelRunnerOutput, ModelRunnerOutput
from rbln_backend.worker.executor import DirectExecutor
from rbln_backend.worker.runner import StepInFlight

EMPTY = ModelRunnerOutput(req_ids=[], req_id_to_index={})


class Worker:
    """Returns or raises what a test wants of a step."""

    def __init__(self, made: ModelRunnerOutput | AsyncModelRunnerOutput | Exception) -> None:
        self.made = made

    def sample_tokens(self, grammar: object) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def executor_of(made: ModelRunnerOutput | AsyncModelRunnerOutput | Exception) -> DirectExecutor:
    executor = DirectExecutor.__new__(DirectExecutor)
    executor.driver_worker = WorkerWrapperBase(rpc_rank=0)
    executor.driver_worker.worker = Worker(made)
    return executor


@pytest.mark.parametrize("made", [EMPTY, StepInFlight(lambda: EMPTY)])
def test_a_result_is_a_whole_future(made: ModelRunnerOutput | AsyncModelRunnerOutput) -> None:
    future = executor_of(made).sample_tokens(None, non_block=True)
    assert isinstance(future, Future)
    called: list[object] = []
    future.add_done_callback(called.append)
    assert future.result() is EMPTY
    assert called == [future]
    assert future.done() and not future.cancel() and future.exception() is None


def test_an_error_of_sampling_is_in_the_future() -> None:
    executor = executor_of(ValueError("no row"))
    future = executor.sample_tokens(None, non_block=True)
    assert isinstance(future, Future)
    with pytest.raises(ValueError, match="no row"):
        future.result()
    with pytest.raises(ValueError, match="no row"):
        executor.sample_tokens(None)


def test_a_step_that_fails_is_ended_once_and_fails_for_every_reader() -> None:
    ends: list[None] = []

    def end() -> ModelRunnerOutput:
        ends.append(None)
        if len(ends) == 1:
            raise ValueError("lost the device")
        return EMPTY

    step = StepInFlight(end)
    for _ in range(2):
        with pytest.raises(ValueError, match="lost the device"):
            step.get_output()
    assert len(ends) == 1
