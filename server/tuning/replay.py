"""The process of a replay: an engine without HTTP that runs requests of given lengths in rounds.

`python -m server.tuning.replay JOB RESULT`; progress on standard output, the log on standard error.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rbln_backend.config import Settled
from rbln_backend.reporting.child_process import report
from rbln_backend.scheduler.simulator import Pace, Request
from server.engine.config import engine_config
from server.settings import ServerSettings
from server.tuning.replayer import ReplayJob, ReplayResult, Round, Step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore

_SCHEDULER = "rbln_backend.worker.replay_worker.ReplayScheduler"
_WORKER = "rbln_backend.worker.replay_worker.ReplayWorker"
# Prompts of no meaning, none of which begins as another one does.
_STRIDE, _FIRST_TOKEN = 7919, 3


def main() -> int:
    """Run the job that the command line names."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ReplayJob)
    report("engine", 0, 1)
    player = _Player(_config(job.argv))
    report("engine", 1, 1)
    ran: list[list[list[Step]]] = [[] for _ in job.rounds]
    for number, index in enumerate(job.order, start=1):
        steps = player.play(job.rounds[index])
        ran[index] += [steps] if number > job.warm_up else []
        report("rounds", number, len(job.order))
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(player.result(ran)))
    player.shutdown()
    return 0


def _config(argv: Sequence[str]) -> VllmConfig:
    settings = ServerSettings()
    from server.vllm.flags import parse_arguments

    _, config = engine_config(parse_arguments(list(argv), settings), settings, None)
    if config.parallel_config.data_parallel_size > 1:
        raise ValueError("one engine is measured: leave --data-parallel-size out")
    # A hit would leave out steps that the trace has.
    config.cache_config.enable_prefix_caching = False
    config.scheduler_config.async_scheduling = False
    config.scheduler_config.scheduler_cls = _SCHEDULER
    config.parallel_config.worker_cls = _WORKER
    return config


class _Player:
    """An engine, stepped by hand."""

    def __init__(self, config: VllmConfig) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self._config = config
        self._core: EngineCore = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._vocab_size = config.model_config.get_vocab_size()
        self._added = 0

    def play(self, played: Round) -> list[Step]:
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

    def result(self, ran: list[list[list[Step]]]) -> ReplayResult:
        """Add what a schedule depends on besides the buckets."""
        settled = self._config.additional_config
        assert isinstance(settled, Settled)
        rbln = settled.rbln
        assert rbln.prefill_step_tokens is not None  # the platform has settled it
        pace = Pace(rbln.decode_steps_per_chunk, rbln.prefill_step_tokens)
        return ReplayResult(ran, self._config.model_config.max_model_len, pace)

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
        prompt = min(request.prompt_tokens, self._config.model_config.max_model_len - 1)
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


if __name__ == "__main__":
    sys.exit(main())
