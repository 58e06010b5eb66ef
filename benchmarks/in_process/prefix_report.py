"""Samples of a prefix measurement, derived figures and the report.

Units: seconds in the data, milliseconds in the report. A ratio is taken between the two engines of
one round and arrival, and only then the median over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.runner.command import RunHeader, disturbance, machine_lines

ON, OFF = "on", "off"
ARRIVALS = ("one by one", "all at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One engine, `caching` on or off, over all requests of one round and arrival.

    `prefill_tokens` is counted by the worker, `cached_tokens` by the engine for each request;
    `ttft_seconds` are from a request's submission to its first token.
    """

    round: int
    caching: str
    arrival: str
    prefill_tokens: int
    cached_tokens: list[int]
    ttft_seconds: list[float]
    total_seconds: float
    other_busy_cores: float
    tokens: list[list[int]]

    @property
    def median_ttft_ms(self) -> float:
        """Median over the requests, in milliseconds."""
        return 1000 * statistics.median(self.ttft_seconds)

    @property
    def first_ttft_ms(self) -> float:
        """Time of the first request, which cannot hit a prefix, in milliseconds."""
        return 1000 * self.ttft_seconds[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """All samples of one checkpoint."""

    name: str
    path: str
    parameters: int
    engine_args: dict[str, Any]
    engines: dict[str, dict[str, Any]]
    samples: list[Sample]

    def of(self, caching: str, arrival: str) -> list[Sample]:
        """Return the samples of one engine and arrival, by round."""
        return [s for s in self.samples if s.caching == caching and s.arrival == arrival]

    def equal_outputs(self) -> tuple[int, int]:
        """Return the number of requests with equal tokens from both engines, and of all."""
        pairs = [
            (with_cache, without)
            for arrival in ARRIVALS
            for a, b in zip(self.of(ON, arrival), self.of(OFF, arrival), strict=True)
            for with_cache, without in zip(a.tokens, b.tokens, strict=True)
        ]
        return sum(a == b for a, b in pairs), len(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command."""

    requests: int
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    rounds: int
    models: list[ModelResult]


def markdown(run: Run) -> str:
    """Return the report of `run`."""
    return "\n".join([_heading(run), *(_model(run, model) for model in run.models)])


def _heading(run: Run) -> str:
    prompt = run.shared_tokens + run.own_tokens
    return "\n".join(
        [
            f"# Prefix hits, {run.started[:10]}, {run.machine.cpu}",
            "",
            f"`{run.command}` at {run.started}, commit {run.machine.commit}.",
            "",
            *machine_lines(run.machine, run.load_before),
            "",
            f"{run.requests} requests of {prompt} random tokens share the first "
            f"{run.shared_tokens}; each gets {run.output_tokens} greedy tokens, bfloat16, "
            f"{run.rounds} rounds with new prompts each. Two engines of the emulated device, with "
            "the prefix cache and without, are given the same prompts in turn; the idle one is "
            "stopped (SIGSTOP). *One by one*: a request is sent when the one before it has ended. "
            "*All at once*: TTFT includes the wait for other requests. TTFT is the median over the "
            "requests, then over rounds; *of it the first* is the request that can hit nothing. "
            "Ratios are taken within a round, with the lowest and the highest in brackets.",
            "",
        ]
    )


def _model(run: Run, model: ModelResult) -> str:
    equal, total = model.equal_outputs()
    rows = [_row(run, model, arrival, caching) for arrival in ARRIVALS for caching in (ON, OFF)]
    args = model.engine_args
    return "\n".join(
        [
            f"## {model.name}: {model.parameters / 1e6:.1f}M parameters",
            "",
            "| arrival | prefix cache | prefill tokens computed | share | TTFT ms "
            "| of it the first | whole run s | TTFT: off / on |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Outputs equal with and without the cache: **{equal} of {total}**.",
            "",
            disturbance([sample.other_busy_cores for sample in model.samples]),
            "",
            f"Context {args['max_model_len']}, chunks of {args['max_num_batched_tokens']}, blocks "
            f"of {args['block_size']} tokens; {'; '.join(model.engines[ON]['log'])}.",
            "",
        ]
    )


def _row(run: Run, model: ModelResult, arrival: str, caching: str) -> str:
    samples, others = model.of(caching, arrival), model.of(OFF, arrival)
    whole = run.requests * (run.shared_tokens + run.own_tokens)

    def median(value: Callable[[Sample], float]) -> float:
        return statistics.median(value(sample) for sample in samples)

    ratio = ""
    if caching == ON:
        pairs = zip(others, samples, strict=True)
        ratios = [off.median_ttft_ms / on.median_ttft_ms for off, on in pairs]
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    computed = median(lambda s: s.prefill_tokens)
    cells = [
        arrival,
        caching,
        f"{computed:,.0f}",
        f"{computed / whole:.1%}",
        f"{median(lambda s: s.median_ttft_ms):.1f}",
        f"{median(lambda s: s.first_ttft_ms):.1f}",
        f"{median(lambda s: s.total_seconds):.2f}",
        ratio,
    ]
    return f"| {' | '.join(cells)} |"
