"""Engine without HTTP, stepped by the caller: runs requests of given lengths in given buckets."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rbln_backend.bucketing.verify import NO_DRAFTS
from rbln_backend.host.child_process import report
from server.tuning.simulator import Pace, Request, Tables

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SCHEDULER = "rbln_backend.worker.replay_worker.ReplayScheduler"
_WORKER = "rbln_backend.worker.replay_worker.ReplayWorker"
# Prompts are arbitrary tokens without a common prefix.
_STRIDE, _FIRST_TOKEN = 7919, 3


class Step(NamedTuple):
    """One step that ran: `size` tokens of a chunk or rows of a batch.

    `seconds` are wall time with the scheduler and sampling.
    """

    phase: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplayRound:
    """A busy period that runs to its end in these buckets only."""

    requests: Sequence[Request]
    tables: Tables


class Player:
    """An engine whose buckets are those of all rounds.

    `config` is changed: prefix hits would leave out steps of the trace, and drafts for these
    prompts would differ from those for the served ones.
    """

    def __init__(self, config: VllmConfig) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        settled: Any = config.additional_config
        config.additional_config = replace(
            settled, buckets=replace(settled.buckets, verify=NO_DRAFTS, drafted=None)
        )
        config.speculative_config = None
        config.cache_config.enable_prefix_caching = False
        config.scheduler_config.async_scheduling = False
        config.scheduler_config.scheduler_cls = _SCHEDULER
        config.parallel_config.worker_cls = _WORKER
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._vocab_size = config.model_config.get_vocab_size()
        self._added = 0
        self.max_model_len: int = config.model_config.max_model_len
        rbln = settled.rbln
        self.pace = Pace(
            rbln.decode_steps_per_chunk,
            rbln.prefill_step_tokens,
            rbln.chunk_prompts,
            rbln.prefill_policy,
            rbln.max_num_partial_prefills,
        )

    def run(
        self, what: str, groups: Sequence[Sequence[ReplayRound]], repeats: int
    ) -> dict[tuple[int, int], list[list[Step]]]:
        """Return the steps of every repeat of each round, by index of its group and in it.

        Rounds of a group run in succession. `what` names the progress.
        """
        ran: dict[tuple[int, int], list[list[Step]]] = {
            (n, which): [] for n, group in enumerate(groups) for which in range(len(group))
        }
        order = list(_order([len(group) for group in groups], repeats))
        for number, (n, which) in enumerate(order):
            steps = self.play(groups[n][which])
            # One round of each group warms up.
            ran[n, which] += [steps] if number >= len(groups) else []
            report(what, number + 1, len(order))
        return ran

    def play(self, played: ReplayRound) -> list[Step]:
        """Run one round to its end."""
        scheduler: Any = self._core.scheduler
        scheduler.use_chunks(played.tables["prefill"])
        self._core.collective_rpc("use_buckets", args=(played.tables,))
        coming = deque(sorted(played.requests, key=lambda request: request.at))
        steps: list[Step] = []
        clock = 0.0
        while coming or scheduler.has_requests():
            if coming and not scheduler.has_requests():
                clock = max(clock, coming[0].at)
            while coming and coming[0].at <= clock:
                self._add(coming.popleft())
            began = time.perf_counter()
            self._core.step()
            seconds = time.perf_counter() - began
            if (taken := scheduler.take_step()) is not None:
                phase, size = taken
                steps.append(Step(phase, size, seconds))
                clock += 1
        return steps

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._core.shutdown()

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._added += 1
        span = self._vocab_size - _FIRST_TOKEN
        start = self._added * _STRIDE
        # A chunk as long as the context would leave no room for an answer.
        prompt = min(request.prompt_tokens, self.max_model_len - 1)
        tokens = [(start + place * 7) % span + _FIRST_TOKEN for place in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
        engine_request = EngineCoreRequest(
            request_id=f"replay-{self._added}",
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(engine_request))


def _order(sizes: Sequence[int], repeats: int) -> Iterator[tuple[int, int]]:
    """Yield a new random order of the groups per repeat, with another first round of each."""
    places = range(len(sizes))
    yield from ((n, n % sizes[n]) for n in places)
    shuffled = random.Random(0)
    for repeat in range(repeats):
        for n in shuffled.sample(places, len(places)):
            yield from ((n, (first + repeat + n) % sizes[n]) for first in range(sizes[n]))
