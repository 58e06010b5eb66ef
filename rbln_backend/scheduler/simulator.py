"""What the scheduler would make of a trace with given buckets, step by step, without a device.

It follows `rbln_backend.scheduler`: a step is one chunk of one prompt or one token of every
request that decodes. Left out are KV blocks (there is always room), prefix hits and adapters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rbln_backend.bucketing.chunk_plan import ChunkPlan
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.tuner import StepTimes
from rbln_backend.bucketing.usage import PHASES, PhaseUsage
from rbln_backend.scheduler.constraints import is_prefill, prefill_block_reason


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; `at_s` counts from the first one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """The compiled sizes of an engine, and the settings that its schedule depends on."""

    prefill: BucketTable
    decode: BucketTable
    max_num_seqs: int
    decode_steps_per_chunk: int = 1
    prefill_step_tokens: int = 0

    @classmethod
    def of(cls, tables: Mapping[str, BucketTable]) -> Shapes:
        """Those of an engine with these buckets and defaults for the rest."""
        return cls(tables["prefill"], tables["decode"], tables["decode"].largest)

    def with_tables(self, tables: Mapping[str, BucketTable]) -> Shapes:
        """The same with other buckets of the same largest sizes."""
        return replace(self, prefill=tables["prefill"], decode=tables["decode"])


Moment = tuple[int, int]
"""A busy period of the engine, and a step of it, both counted from 0."""


@dataclass(slots=True)
class Schedule:
    """Steps by phase with predicted seconds, and before which step each request came."""

    phases: dict[str, PhaseUsage] = field(
        default_factory=lambda: {phase: PhaseUsage() for phase in PHASES}
    )
    came_before: list[Moment] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Predicted seconds of all steps; an idle engine takes none."""
        return sum(sum(usage.seconds_by_bucket.values()) for usage in self.phases.values())


@dataclass(slots=True)
class _Request:
    prompt_left: int
    output_left: int


def simulate(
    arrivals: Sequence[Arrival],
    shapes: Shapes,
    times: Mapping[str, StepTimes],
    came_before: Sequence[Moment] | None = None,
) -> Schedule:
    """Run the trace to its end; `times` by phase decide who has come by which step.

    With `came_before` of an earlier schedule requests come before these steps instead, so that two
    sets of buckets are compared at the same work: in busy periods one after the other, and a wait
    for the next request of a period takes no steps.
    """
    return _Simulation(arrivals, shapes, times, came_before).run()


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        shapes: Shapes,
        times: Mapping[str, StepTimes],
        came_before: Sequence[Moment] | None,
    ) -> None:
        self._coming = deque(arrivals)
        self._moments = None if came_before is None else deque(came_before)
        self._now: Moment = (-1, 0)
        self._shapes, self._times = shapes, times
        self._chunks = ChunkPlan(shapes.prefill, shapes.prefill_step_tokens)
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._decodes_owed = 0
        self._clock = 0.0
        self._schedule = Schedule()

    def run(self) -> Schedule:
        while self._coming or self._waiting or self._running:
            if not self._waiting and not self._running:
                self._wait()
            while self._coming and self._next_is_due():
                self._receive_next()
            self._step()
            self._now = (self._now[0], self._now[1] + 1)
        return self._schedule

    def _wait(self) -> None:
        """Nothing runs until the next request comes."""
        if self._moments is None:
            self._clock = max(self._clock, self._coming[0].at_s)
            self._now = (self._now[0] + 1, 0)
        else:
            self._now = self._moments[0]

    def _next_is_due(self) -> bool:
        if self._moments is not None:
            return self._moments[0] <= self._now
        return self._coming[0].at_s <= self._clock

    def _receive_next(self) -> None:
        arrival = self._coming.popleft()
        if self._moments is not None:
            self._moments.popleft()
        self._waiting.append(_Request(arrival.prompt_tokens, arrival.output_tokens))
        self._schedule.came_before.append(self._now)

    def _step(self) -> None:
        prefilling = [request for request in self._running if _needs_chunk(request)]
        decoding = len(self._running) - len(prefilling)
        blocked = prefill_block_reason(
            num_prefilling=len(prefilling),
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            max_num_seqs=self._shapes.max_num_seqs,
            decodes_owed=self._decodes_owed > 0 and decoding > 0,
        )
        if blocked is None:
            request = prefilling[0] if prefilling else self._admit()
            self._decodes_owed = self._shapes.decode_steps_per_chunk
            if _needs_chunk(request):
                self._prefill(request)
            else:
                # A prompt of one token is a row, and the others do not see the step that admits it.
                self._decode([request])
            return
        self._decodes_owed = max(0, self._decodes_owed - 1)
        self._decode([request for request in self._running if not _needs_chunk(request)])

    def _admit(self) -> _Request:
        request = self._waiting.popleft()
        self._running.append(request)
        return request

    def _prefill(self, request: _Request) -> None:
        size = self._chunks.next_chunk(request.prompt_left)
        self._spend("prefill", size, self._shapes.prefill)
        request.prompt_left -= size
        if request.prompt_left == 0:
            self._answer(request)

    def _decode(self, ready: Sequence[_Request]) -> None:
        self._spend("decode", len(ready), self._shapes.decode)
        for request in ready:
            request.prompt_left = 0
            self._answer(request)

    def _answer(self, request: _Request) -> None:
        request.output_left -= 1
        if request.output_left == 0:
            self._running.remove(request)

    def _spend(self, phase: str, size: int, table: BucketTable) -> None:
        bucket = table.find(size)
        seconds = self._times[phase].of(bucket, size)
        self._schedule.phases[phase].note(size, bucket, seconds)
        self._clock += seconds


def _needs_chunk(request: _Request) -> bool:
    return request.prompt_left > 0 and is_prefill(0, request.prompt_left)
