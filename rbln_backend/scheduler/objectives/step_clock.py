"""Measured seconds of the steps of a scheduler, by phase and bucket."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rbln_backend.bucketing.step_times import StepTimes
from rbln_backend.vllm_compat.surface import SchedulerOutput

PREFILL, DECODE = "prefill", "decode"
_NEWEST_SHARE = 0.1
"""Weight of the newest step in the mean time of its bucket."""


class StepClock:
    """Mean seconds of recent steps, from when a step could begin to its outputs."""

    def __init__(
        self, bucket: Callable[[str, int], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``bucket`` returns the compiled size of so many tokens (prefill) or rows (decode)."""
        self._bucket, self._clock = bucket, clock
        self._begun: deque[tuple[SchedulerOutput, float]] = deque()
        self._ended = 0.0
        self._means: dict[str, dict[int, float]] = {PREFILL: {}, DECODE: {}}

    def begin(self, output: SchedulerOutput) -> None:
        """Note a step that was scheduled."""
        if output.total_num_scheduled_tokens:
            self._begun.append((output, self._clock()))

    def end(self, output: SchedulerOutput) -> None:
        """Note that a step has run. Steps end in the order in which they began."""
        while self._begun:
            step, began = self._begun.popleft()
            if step is output:
                now = self._clock()
                self._add(output, now - max(began, self._ended))
                self._ended = now
                return

    def seconds(self, phase: str, size: int) -> float | None:
        """Return the seconds of a step of ``size`` tokens or rows; None before the first one."""
        means = self._means[phase]
        return StepTimes(means).of(self._bucket(phase, size)) if means else None

    def _add(self, output: SchedulerOutput, seconds: float) -> None:
        tokens, rows = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        is_decode = tokens == rows or bool(output.scheduled_spec_decode_tokens)
        phase, size = (DECODE, rows) if is_decode else (PREFILL, tokens)
        bucket = self._bucket(phase, size)
        mean = self._means[phase].setdefault(bucket, seconds)
        self._means[phase][bucket] = mean + _NEWEST_SHARE * (seconds - mean)
