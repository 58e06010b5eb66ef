"""The result of a step that the device may still run."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rbln_backend.vllm_compat.surface import AsyncModelRunnerOutput, ModelRunnerOutput


class StepInFlight(AsyncModelRunnerOutput):
    """Ends a step where its result is read first: by the engine, or by the step after it.

    The engine may read from another thread than the one that runs steps.
    """

    def __init__(self, end: Callable[[], ModelRunnerOutput]) -> None:
        """``end`` waits for the device, samples and records; it is called once."""
        self._end = end
        self._lock = threading.Lock()
        self._output: ModelRunnerOutput | None = None

    def get_output(self) -> ModelRunnerOutput:
        """Return the result, after the device's end of the step."""
        with self._lock:
            if self._output is None:
                self._output = self._end()
            return self._output
