"""Times of the parts of a decode step in the engine process, in and outside the graph.

``python -m benchmarks step_profile --model 15m --batch 1 8 --save``. An engine runs in this process
without HTTP; its methods are timed from here, so the product needs no clocks for it.
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models.shapes import SHAPES, Checkpoint, find_checkpoint
from benchmarks.runner.command import (
    Command,
    RunHeader,
    begin,
    compact_json,
    disturbance,
    heading,
    positive,
    say,
)
from benchmarks.runner.machine import busy_cpu_seconds

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

OUTSIDE_ROW = "all but the graph, engine process"
OUTSIDE = ("graph", "decode (HTTP process)")
"""Parts of a step that are not the engine process outside the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One function under cProfile, which makes Python slower: a ranking, not times. Per step."""

    name: str
    calls: float
    own_us: float
    all_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """`steps`: microseconds of every part of every step."""

    batch: int
    steps: list[dict[str, float]]
    functions: list[Function]
    other_busy_cores: float

    def parts(self) -> dict[str, tuple[float, float, float]]:
        """Return the median, 10th and 99th percentile of each part, and of all outside the graph.

        The last, `OUTSIDE_ROW`, is the engine process's.
        """
        times = {part: [step[part] for step in self.steps] for part in self.steps[0]}
        times[OUTSIDE_ROW] = [
            sum(us for part, us in step.items() if part not in OUTSIDE) for step in self.steps
        ]
        return {part: _percentiles(values) for part, values in times.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command."""

    model: str
    parameters: int
    prompt_tokens: int
    temperature: float
    results: list[BatchResult]


def markdown(run: Run) -> str:
    """Return the report."""
    lines = [
        *heading("Parts of a decode step", run),
        f"- Model {run.model}, {run.parameters / 1e6:.1f}M parameters; prompts of "
        f"{run.prompt_tokens} tokens, temperature {run.temperature:g}; one engine in one process.",
        f"- {disturbance([result.other_busy_cores for result in run.results])}",
    ]
    for result in run.results:
        lines += ["", f"## Batch {result.batch}", "", *_parts(result), "", *_function_rows(result)]
    return "\n".join(lines) + "\n"


def _parts(result: BatchResult) -> list[str]:
    rows = [f"{len(result.steps)} steps, microseconds.", ""]
    rows += ["| part | median | 10th percentile | 99th percentile |", "|---|---|---|---|"]
    for part, (middle, low, high) in result.parts().items():
        name = f"**{part}**" if part == OUTSIDE_ROW else part
        rows.append(f"| {name} | {middle:.0f} | {low:.0f} | {high:.0f} |")
    return rows


def _percentiles(values: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(values, n=100)
    return statistics.median(values), cuts[9], cuts[98]


def _function_rows(result: BatchResult) -> list[str]:
    rows = ["Functions by their own time under cProfile (a ranking: it slows Python down).", ""]
    rows += ["| function | calls per step | own us | with callees us |", "|---|---|---|---|"]
    rows += [
        f"| `{row.name}` | {row.calls:.1f} | {row.own_us:.1f} | {row.all_us:.1f} |"
        for row in result.functions
    ]
    return rows


def to_json(run: Run) -> str:
    """Return the percentiles of every part in microseconds, one batch a line."""
    document = asdict(run)
    document["results"] = [
        {
            "batch": result.batch,
            "other_busy_cores": result.other_busy_cores,
            "parts": {part: [round(us, 1) for us in row] for part, row in result.parts().items()},
        }
        for result in run.results
    ]
    return compact_json(document)


MAX_MODEL_LEN = 1024
KV_CACHE_BYTES = 1 << 29
PROFILED_STEPS = 300
_TIMED = ("schedule", "execute", "graph", "sampling", "update")
_US = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return Command("step_profile", _parser(), _measure, markdown, to_json).main(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks step_profile", description=__doc__)
    parser.add_argument(
        "--model",
        default="15m",
        metavar="SIZE|PATH",
        help=f"a size to build ({', '.join(SHAPES)}) or a checkpoint folder (default: 15m)",
    )
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 8], help="default: 1 8")
    parser.add_argument("--steps", type=positive, default=3000, help="per batch (default: 3000)")
    parser.add_argument("--prompt-tokens", type=positive, default=32, help="default: 32")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, as by default")
    return parser


def _measure(args: argparse.Namespace, command: str) -> Run:
    if args.prompt_tokens > MAX_MODEL_LEN // 2:
        raise ValueError(f"--prompt-tokens {args.prompt_tokens} exceeds {MAX_MODEL_LEN // 2}")
    begun = begin(command)
    checkpoint = find_checkpoint(args.model)
    with tempfile.TemporaryDirectory(prefix="rbln-steps-") as run_dir:
        say(f"starting an engine for {checkpoint.name}")
        core = start_engine(checkpoint, max(args.batch), Path(run_dir))
        try:
            results = [_measure_batch(core, checkpoint, batch, args) for batch in args.batch]
        finally:
            core.shutdown()
    return Run(
        **begun,
        model=checkpoint.name,
        parameters=checkpoint.parameters,
        prompt_tokens=args.prompt_tokens,
        temperature=args.temperature,
        results=results,
    )


def start_engine(checkpoint: Checkpoint, largest_batch: int, run_dir: Path) -> EngineCore:
    """Start an engine with the server's defaults; its metrics go to `run_dir`, as the server's."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from rbln_backend.buckets import DEFAULT_CHUNK_TOKENS, DEFAULT_MAX_NUM_SEQS

    config = EngineArgs(
        model=str(checkpoint.path),
        max_model_len=min(MAX_MODEL_LEN, checkpoint.max_position_embeddings),
        max_num_seqs=max(DEFAULT_MAX_NUM_SEQS, largest_batch),
        max_num_batched_tokens=DEFAULT_CHUNK_TOKENS,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        skip_tokenizer_init=True,
        additional_config={"rbln": {"run_dir": str(run_dir)}},
        seed=0,
    ).create_engine_config()
    return EngineCore(config, Executor.get_class(config), log_stats=True)


def _measure_batch(
    core: EngineCore, checkpoint: Checkpoint, batch: int, args: argparse.Namespace
) -> BatchResult:
    load = DecodeLoad(core, checkpoint, batch, args.prompt_tokens, args.temperature)
    with StepClock(core) as clock:
        wall, own, all_busy = time.perf_counter(), time.process_time(), busy_cpu_seconds()
        steps = [clock.step() for _ in load.decode_steps(args.steps)]
        wall = time.perf_counter() - wall
        own, all_busy = time.process_time() - own, busy_cpu_seconds() - all_busy
    profile = cProfile.Profile()
    for _ in load.decode_steps(PROFILED_STEPS):
        profile.runcall(core.step)
    say(f"  batch {batch}: {len(steps)} steps")
    return BatchResult(
        batch=batch,
        steps=steps,
        functions=_functions(profile),
        other_busy_cores=max(0.0, all_busy - own) / wall,
    )


class DecodeLoad:
    """`batch` requests that decode until their context is full, again and again."""

    def __init__(
        self,
        core: EngineCore,
        checkpoint: Checkpoint,
        batch: int,
        prompt_tokens: int,
        temperature: float,
    ) -> None:
        self._core = core
        self._vocab_size = checkpoint.vocab_size
        self._batch = batch
        self._prompt_tokens = prompt_tokens
        self._temperature = temperature
        self._added = 0

    def decode_steps(self, count: int) -> Any:
        """Yield `count` times, each time with all requests decoding; the caller steps."""
        per_round = MAX_MODEL_LEN - self._prompt_tokens - 8
        while count > 0:
            steps = min(count, per_round)
            names = [self.add() for _ in range(self._batch)]
            requests = self._core.scheduler.requests  # type: ignore[attr-defined]
            while any(requests[name].num_output_tokens < 2 for name in names):
                self._core.step()
            yield from range(steps)
            count -= steps
            self._core.abort_requests(names)
            while self._core.scheduler.has_requests():
                self._core.step()

    def add(self) -> str:
        """Add a request; return its id."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._added += 1
        name = f"step-{self._added}"
        # No two prompts share a prefix: a hit would shorten the prefill, not the steps.
        tokens = [(self._added * 31 + i * 7) % (self._vocab_size - 3) + 3 for i in range(64)]
        sampling = SamplingParams(
            temperature=self._temperature, max_tokens=MAX_MODEL_LEN, ignore_eos=True
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=(tokens * (self._prompt_tokens // 64 + 1))[: self._prompt_tokens],
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))
        return name


class StepClock:
    """Times the parts of a step by standing in for the engine's methods until ``__exit__``."""

    def __init__(self, core: EngineCore) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._core = core
        self._spent = dict.fromkeys(_TIMED, 0.0)
        self._replaced: list[tuple[object, str]] = []
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._buffer = bytearray()

    def __enter__(self) -> StepClock:
        worker: Any = self._core.model_executor.driver_worker.worker
        steps = worker._runner
        self._time(self._core.scheduler, "schedule", "schedule")
        self._time(self._core.scheduler, "update_from_output", "update")
        self._time(self._core.model_executor, "execute_model", "execute")
        self._time(self._core.model_executor, "sample_tokens", "sampling")
        for graph in steps._graphs.dispatch._graphs.values():
            self._time(graph, "run", "graph")
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name in self._replaced:
            delattr(owner, name)

    def step(self) -> dict[str, float]:
        """Run one step and return the microseconds of its parts."""
        spent = self._spent = dict.fromkeys(_TIMED, 0.0)
        started = time.perf_counter()
        outputs, _ = self._core.step()
        whole = time.perf_counter() - started
        message = outputs[0]
        started = time.perf_counter()
        buffers = self._encoder.encode_into(message, self._buffer)
        encoded = time.perf_counter()
        self._decoder.decode(buffers)
        decoded = time.perf_counter()
        named = spent["schedule"] + spent["update"] + spent["execute"] + spent["sampling"]
        parts = {
            "schedule": spent["schedule"],
            "inputs": spent["execute"] - spent["graph"],
            "graph": spent["graph"],
            "sampling": spent["sampling"],
            "update": spent["update"],
            "rest": whole - named,
            "encode": encoded - started,
            "decode (HTTP process)": decoded - encoded,
        }
        return {name: seconds * _US for name, seconds in parts.items()}

    def _time(self, owner: object, name: str, part: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self._spent[part] += time.perf_counter() - started

        setattr(owner, name, timed)
        self._replaced.append((owner, name))


def _functions(profile: cProfile.Profile) -> list[Function]:
    """Return the functions with the most own time, per step."""
    profile.create_stats()
    stats: dict[tuple[str, int, str], tuple[Any, ...]] = profile.stats
    rows = [
        Function(
            name=f"{Path(file).name}:{line} {name}" if line else name,
            calls=calls / PROFILED_STEPS,
            own_us=own / PROFILED_STEPS * _US,
            all_us=cumulative / PROFILED_STEPS * _US,
        )
        for (file, line, name), (_, calls, own, cumulative, _callers) in stats.items()
    ]
    return sorted(rows, key=lambda row: row.own_us, reverse=True)[:40]
