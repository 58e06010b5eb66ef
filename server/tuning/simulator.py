"""Simulation of the scheduler on a trace with given buckets, without a device.

It follows `rbln_backend.scheduler`: a step is one chunk, of one prompt or of several whole prompts,
or one token of every decoding request. It ignores KV blocks, prefix hits and adapters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice

from rbln_backend.api.requests import AGING, is_prefill, prefill_block_reason
from rbln_backend.bucketing.chunk_plan import ChunkPlan, room_of
from rbln_backend.bucketing.step_times import StepTimes
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.usage import Usage

Tables = Mapping[str, BucketTable]
"""Buckets by phase."""
Times = Mapping[str, StepTimes]
"""Step times by phase."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace; it arrives `at` seconds after the first one.

    In a busy period it arrives before the step numbered `at` instead.
    """

    at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Pace:
    """Engine settings besides the buckets that change its steps."""

    decode_steps_per_chunk: int = 1
    prefill_step_tokens: int = 0
    prefill_prompts: int = 1
    prefill_policy: str = "shortest"
    max_num_partial_prefills: int = 4


@dataclass(slots=True)
class Schedule:
    """Steps with their predicted seconds, and the requests by busy period and step."""

    usage: Usage = field(default_factory=Usage)
    periods: list[list[Request]] = field(default_factory=list)


def simulate(
    requests: Sequence[Request], tables: Tables, times: Times, pace: Pace | None = None
) -> Schedule:
    """Run a trace to its end; step times decide which requests have arrived by each step."""
    simulation = _Simulation(tables, times, pace or Pace(), by_steps=False)
    simulation.run(requests)
    return simulation.schedule


def simulate_periods(
    periods: Sequence[Sequence[Request]], tables: Tables, times: Times, pace: Pace | None = None
) -> Usage:
    """Run the busy periods of a schedule, with other buckets at the same work."""
    simulation = _Simulation(tables, times, pace or Pace(), by_steps=True)
    for period in periods:
        simulation.run(period)
    return simulation.schedule.usage


@dataclass(slots=True, eq=False)
class _SimulatedRequest:
    prompt_left: int
    output_left: int
    number: int
    """Number of its arrival."""
    due: int
    """Computed prompt tokens after which it is first."""

    @property
    def needs_chunk(self) -> bool:
        return self.prompt_left > 0 and is_prefill(0, self.prompt_left)


class _Simulation:
    def __init__(self, tables: Tables, times: Times, pace: Pace, *, by_steps: bool) -> None:
        self.schedule = Schedule()
        self._tables, self._times = tables, times
        self._steps_per_chunk, self._by_steps = pace.decode_steps_per_chunk, by_steps
        self._chunks = ChunkPlan(tables["prefill"], pace.prefill_step_tokens, pace.prefill_prompts)
        self._by_length = pace.prefill_policy == "shortest"
        self._most_partial = pace.max_num_partial_prefills
        self._arrived = self._computed = 0

    def run(self, requests: Sequence[Request]) -> None:
        coming = deque(requests)
        self._waiting: deque[_SimulatedRequest] = deque()
        self._running: list[_SimulatedRequest] = []
        self._owed, self._clock, step = 0, 0.0, 0
        while coming or self._waiting or self._running:
            if not self._waiting and not self._running:
                self._clock, step = max(self._clock, coming[0].at), 0
                self.schedule.periods.append([])
            while coming and coming[0].at <= self._clock:
                prompt, output = coming[0].prompt_tokens, coming.popleft().output_tokens
                due = self._computed + AGING * prompt
                self._waiting.append(_SimulatedRequest(prompt, output, self._arrived, due))
                self._arrived += 1
                self.schedule.periods[-1].append(Request(step, prompt, output))
            self._step()
            step += 1

    def _step(self) -> None:
        prefilling = [request for request in self._running if request.needs_chunk]
        decoding = [request for request in self._running if not request.needs_chunk]
        blocked = prefill_block_reason(
            num_prefilling=len(prefilling),
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            max_num_seqs=self._tables["decode"].largest,
            decodes_owed=self._owed > 0 and bool(decoding),
        )
        if blocked is not None:
            self._owed = max(0, self._owed - 1)
            self._run_step("decode", len(decoding), decoding)
            return
        chosen = self._admit(prefilling)
        self._owed = self._steps_per_chunk
        if not any(request.needs_chunk for request in chosen):
            # A prompt of one token is a decode row, and this step has no other requests.
            self._run_step("decode", len(chosen), chosen)
        elif len(chosen) > 1:
            tokens = sum(request.prompt_left for request in chosen)
            self._run_step("prefill", room_of(tokens, len(chosen)), chosen)
        else:
            self._run_step("prefill", self._chunks.next_chunk(chosen[0].prompt_left), chosen)

    def _admit(self, prefilling: list[_SimulatedRequest]) -> list[_SimulatedRequest]:
        """Return the requests of a prefill step: the first one, and all that fit with it."""
        capacity = self._tables["decode"].largest - len(self._running)
        queue = [*prefilling, *islice(self._waiting, capacity)]
        if self._by_length:
            queue = self._shortest_first(prefilling, capacity)
        chosen = queue[: self._chunks.together([r.prompt_left for r in queue])]
        for request in chosen:
            if request not in prefilling:
                self._waiting.remove(request)
                self._running.append(request)
        return chosen

    def _shortest_first(
        self, prefilling: list[_SimulatedRequest], capacity: int
    ) -> list[_SimulatedRequest]:
        waiting = nsmallest(min(capacity, self._chunks.prompts), self._waiting, key=self._place)
        if len(prefilling) >= self._most_partial:
            waiting = [r for r in waiting if r.prompt_left <= self._chunks.largest]
        return sorted([*prefilling, *waiting], key=self._place)

    def _place(self, request: _SimulatedRequest) -> tuple[bool, int, int]:
        is_aged = request.due <= self._computed
        return not is_aged, 0 if is_aged else request.prompt_left, request.number

    def _run_step(self, phase: str, size: int, served: Sequence[_SimulatedRequest]) -> None:
        bucket = self._tables[phase].find(size)
        seconds = self._times[phase].of(bucket, size)
        self.schedule.usage.phases[phase].note(size, bucket, seconds)
        self._clock += 1 if self._by_steps else seconds
        if phase == "prefill":
            self._computed += sum(min(size, request.prompt_left) for request in served)
        for request in served:
            request.prompt_left -= min(size, request.prompt_left)
            request.output_left -= request.prompt_left == 0
            if request.output_left == 0:
                self._running.remove(request)
