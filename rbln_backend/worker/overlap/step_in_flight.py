"""The result of a step that the device may still run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from rbln_backend.vllm_compat.surface import AsyncModelRunnerOutput, ModelRunnerOutput


class StepInFlight(AsyncModelRunnerOutput):
    """Ends a step where its result is read first: by the engine, or by the step after it.

    The engine may read from another thread than the one that runs steps.
    """

    def __init__(self, end: Callable[[], ModelRunnerOutput]) -> None:
        """``end`` waits for the device, samples and records; it is called once."""
        self._end = end
        self._lock = threading.Lock()
        self._ended: Future[ModelRunnerOutput] = Future()

    def get_output(self) -> ModelRunnerOutput:
        """Return the result, after the device's end of the step, or raise what ended it."""
        with self._lock:
            if not self._ended.done():
                try:
                    self._ended.set_result(self._end())
                except BaseException as error:
                    self._ended.set_exception(error)
                    raise
            return self._ended.result()
