"""Refusal of requests that would miss their objectives, and how good the predictions were."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rbln_backend.bucketing.chunk_plan import ChunkPlan
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.scheduler.expiry import report_end
from rbln_backend.scheduler.objectives.forecast import LoadAhead, forecast
from rbln_backend.scheduler.objectives.objective import (
    OBJECTIVE_MISSED,
    Miss,
    Objective,
)
from rbln_backend.scheduler.objectives.step_clock import PREFILL, StepClock
from rbln_backend.vllm_compat.surface import EngineCoreOutputs, Request, SchedulerOutput


@dataclass(slots=True)
class _Admitted:
    """An admitted request: its arrival, and the predicted seconds; None: not predicted."""

    arrival: float
    first_s: float | None
    token_s: float | None
    began: float | None = None
    """Time of its first token."""
    more: int = 0
    """Tokens after those of the first output."""

    def begin(self, now: float) -> float | None:
        """Note the first token; return its time over the predicted one."""
        self.began = now
        return None if self.first_s is None else (now - self.arrival) / max(self.first_s, 1e-6)

    def end(self, now: float) -> float | None:
        """Return the mean time of a token after the first over the predicted one."""
        if self.token_s is None or self.began is None:
            return None
        return (now - self.began) / self.more / max(self.token_s, 1e-6)


class ObjectiveGate:
    """Compares predictions with the objectives of new requests, and later with what happened."""

    def __init__(
        self,
        board: MetricsBoard,
        chunks: ChunkPlan | None,
        decode: BucketTable | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Sizes are None for models that pool, whose requests have no objectives.

        ``clock`` is the one of requests' arrival times, in seconds.
        """
        self._first_ratio = board.histogram("rbln_objective_first_token_ratio")
        self._token_ratio = board.histogram("rbln_objective_token_ratio")
        self._clock, self._chunks = clock, chunks
        self._steps = StepClock(self._bucket)
        self._decode = decode
        self._missed: dict[str, Miss] = {}
        self._expected: dict[str, _Admitted] = {}

    def _bucket(self, phase: str, size: int) -> int:
        """Return the compiled size of a step."""
        if self._chunks is None or self._decode is None:
            return size
        if phase == PREFILL:
            return self._chunks.bucket(size)
        return self._decode.find(min(size, self._decode.largest))

    def take_sizes(self, chunks: ChunkPlan | None, decode: BucketTable | None) -> None:
        """Predict with other compiled sizes; the measured times stay, as they are by size."""
        self._chunks, self._decode = chunks, decode

    def begin(self, step: SchedulerOutput) -> None:
        """Note a step that was scheduled."""
        self._steps.begin(step)

    def end(self, step: SchedulerOutput) -> None:
        """Note that a step has run."""
        self._steps.end(step)

    def add(self, request: Request, load: Callable[[], LoadAhead]) -> None:
        """Check a new request; ``load`` is called if it has an objective."""
        params = request.sampling_params
        objective = Objective.of(params.extra_args if params is not None else None)
        if not objective or self._chunks is None:
            return
        expected = forecast(load(), self._steps.seconds, self._chunks.next_chunk)
        waited = max(0.0, self._clock() - request.arrival_time)
        first = None if expected.first_token_s is None else waited + expected.first_token_s
        miss = _miss("ttft", first, objective.ttft_ms)
        miss = miss or _miss("tpot", expected.token_s, objective.tpot_ms)
        if miss is not None:
            self._missed[request.request_id] = miss
        elif first is not None or expected.token_s is not None:
            self._expected[request.request_id] = _Admitted(
                request.arrival_time, first, expected.token_s
            )

    @property
    def missed(self) -> list[str]:
        """Requests to end before the next step, which ``report`` reports after it."""
        return list(self._missed)

    def report(
        self,
        refused: list[Request],
        requests: Mapping[str, Request],
        outputs: dict[int, EngineCoreOutputs],
    ) -> None:
        """Observe the tokens of a step's ``outputs``, and add refusals at their front.

        ``requests`` are unfinished ones. Empties ``refused``.
        """
        if self._expected:
            self._observe(outputs)
            for name in self._expected.keys() - requests.keys():
                del self._expected[name]
        if self._missed:
            self._refuse(refused, outputs)

    def _observe(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        now = self._clock()
        for answered in [out for step in outputs.values() for out in step.outputs]:
            admitted = self._expected.get(answered.request_id)
            if admitted is None or not answered.new_token_ids:
                continue
            if admitted.began is None:
                if (ratio := admitted.begin(now)) is not None:
                    self._first_ratio.observe(ratio)
                continue
            admitted.more += len(answered.new_token_ids)
            ratio = None if answered.finish_reason is None else admitted.end(now)
            if ratio is not None:
                self._token_ratio.observe(ratio)

    def _refuse(self, ended: list[Request], outputs: dict[int, EngineCoreOutputs]) -> None:
        for request in ended:
            miss = self._missed.pop(request.request_id)
            report_end(request, outputs, OBJECTIVE_MISSED, miss.as_report())
        ended.clear()
        self._missed.clear()


def _miss(name: str, predicted_s: float | None, limit_ms: float | None) -> Miss | None:
    if predicted_s is None or limit_ms is None or 1000 * predicted_s <= limit_ms:
        return None
    return Miss(name, 1000 * predicted_s, limit_ms)
