"""Samples of a decode measurement, derived figures and the report.

Units: seconds and bytes in the data, milliseconds and GB/s (10^9 bytes) in the report. A ratio is
taken between two sides of one round and batch, and only then the median over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.runner.command import RunHeader, disturbance, machine_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One side at one batch in one round.

    `prefill_seconds` are whole calls for one output token, `total_seconds` one for all of them.
    `busy_cores` is the engine's CPU time over wall time, `other_busy_cores` that of others.
    """

    round: int
    side: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_seconds: list[float]
    total_seconds: float
    busy_cores: float
    other_busy_cores: float
    first_tokens: list[int]

    @property
    def step_ms(self) -> float:
        """Milliseconds of one decode step: each gives every request of the batch one token."""
        decode = self.total_seconds - statistics.median(self.prefill_seconds)
        return 1000 * decode / (self.output_tokens - 1)

    @property
    def decode_rate(self) -> float:
        """Output tokens per second after the first."""
        return 1000 * self.batch / self.step_ms

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second until the first output token of every request."""
        return self.batch * self.prompt_tokens / statistics.median(self.prefill_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """All samples of one checkpoint and the read bandwidth, in bytes/s, at the start of a round."""

    name: str
    path: str
    parameters: int
    step_weight_bytes: int
    engine_args: dict[str, Any]
    engines: dict[str, dict[str, Any]]
    read_bandwidths: list[float]
    samples: list[Sample]

    def of(self, side: str, batch: int) -> list[Sample]:
        """Return the samples of `side` at `batch`, by round."""
        return [s for s in self.samples if s.side == side and s.batch == batch]

    def bandwidth_fractions(self, side: str, batch: int) -> list[float]:
        """Return, by round, the share of the measured bandwidth that reading the weights took."""
        return [
            self.step_weight_bytes / (s.step_ms / 1000) / self.read_bandwidths[s.round - 1]
            for s in self.of(side, batch)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(RunHeader):
    """One run of the command. The first of `sides` is ours, the others are its peers."""

    prompt_tokens: int
    output_tokens: int
    rounds: int
    sides: dict[str, dict[str, Any]]
    models: list[ModelResult]


def markdown(run: Run) -> str:
    """Return the report of `run`."""
    parts = [_heading(run), *(_model(run, model) for model in run.models)]
    return "\n".join(parts)


def _heading(run: Run) -> str:
    machine = run.machine
    sides = [
        f"- `{name}`: {side['note']} (environment: {_environment(side['env'])})."
        for name, side in run.sides.items()
    ]
    return "\n".join(
        [
            f"# Decode, {run.started[:10]}, {machine.cpu}",
            "",
            f"`{run.command}` at {run.started}, commit {machine.commit}.",
            "",
            *machine_lines(machine, run.load_before),
            *sides,
            "",
            f"Prompts of {run.prompt_tokens} random tokens, {run.output_tokens} greedy output "
            f"tokens, bfloat16, {run.rounds} rounds. Sides alternate within every round and batch; "
            "the idle ones are stopped (SIGSTOP). Prefill is the time of a call for one output "
            "token; decode is the time of the whole call minus that. Medians over rounds; ratios "
            "are taken within a round, above 1 ours is faster, with the lowest and the highest in "
            "brackets.",
            "",
        ]
    )


def _environment(env: dict[str, str]) -> str:
    return " ".join(f"`{name}={value}`" for name, value in env.items())


def _model(run: Run, model: ModelResult) -> str:
    batches = sorted({sample.batch for sample in model.samples})
    rows = [_row(run, model, side, batch) for batch in batches for side in run.sides]
    low, high = min(model.read_bandwidths), max(model.read_bandwidths)
    started = ", ".join(
        f"{side} {engine['startup_seconds']:.1f} s" for side, engine in model.engines.items()
    )
    return "\n".join(
        [
            f"## {model.name}: {model.parameters / 1e6:.1f}M parameters",
            "",
            f"A decode step reads {model.step_weight_bytes / 1e6:.1f} MB of weights. All cores "
            f"read a buffer of that size at {statistics.median(model.read_bandwidths) / 1e9:.1f} "
            f"GB/s ({low / 1e9:.1f} to {high / 1e9:.1f}); *of limit* is the share of this that "
            "the weights alone account for.",
            "",
            "| batch | side | decode tokens/s | ms per step | of limit | busy cores "
            "| prefill tokens/s | decode: ours / side | prefill: ours / side |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            disturbance([sample.other_busy_cores for sample in model.samples]),
            "",
            "ms per step, by round:",
            "",
            *_rounds(run, model, batches),
            "",
            f"First tokens that agree with ours: {_agreement(run, model)}. Ready after: {started} "
            "(not part of any figure above).",
            "",
            *_engine_notes(model),
            "",
        ]
    )


def _row(run: Run, model: ModelResult, side: str, batch: int) -> str:
    samples = model.of(side, batch)
    first = next(iter(run.sides))
    ours = model.of(first, batch)

    def median(value: Callable[[Sample], float]) -> float:
        return statistics.median(value(sample) for sample in samples)

    def ratio(rate: Callable[[Sample], float]) -> str:
        if side == first:
            return ""
        ratios = [rate(a) / rate(b) for a, b in zip(ours, samples, strict=True)]
        return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"

    cells = [
        str(batch),
        side,
        f"{median(lambda s: s.decode_rate):.1f}",
        f"{median(lambda s: s.step_ms):.3f}",
        f"{statistics.median(model.bandwidth_fractions(side, batch)):.0%}",
        f"{median(lambda s: s.busy_cores):.1f}",
        f"{median(lambda s: s.prefill_rate):.0f}",
        ratio(lambda s: s.decode_rate),
        ratio(lambda s: s.prefill_rate),
    ]
    return f"| {' | '.join(cells)} |"


def _rounds(run: Run, model: ModelResult, batches: list[int]) -> list[str]:
    columns = [(side, batch) for batch in batches for side in run.sides]
    lines = [
        f"| round | GB/s | {' | '.join(f'{side} x{batch}' for side, batch in columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for index, bandwidth in enumerate(model.read_bandwidths):
        steps = [f"{model.of(side, batch)[index].step_ms:.3f}" for side, batch in columns]
        lines.append(f"| {index + 1} | {bandwidth / 1e9:.1f} | {' | '.join(steps)} |")
    return lines


def _agreement(run: Run, model: ModelResult) -> str:
    """Return the counts of equal first greedy tokens, which mostly agree for one model."""
    ours, *peers = run.sides
    expected = {(s.round, s.batch): s.first_tokens for s in model.samples if s.side == ours}
    texts = []
    for peer in peers:
        pairs = [
            (a, b)
            for sample in model.samples
            if sample.side == peer
            for a, b in zip(expected[sample.round, sample.batch], sample.first_tokens, strict=True)
        ]
        texts.append(f"{peer} {sum(a == b for a, b in pairs)} of {len(pairs)}")
    return ", ".join(texts)


def _engine_notes(model: ModelResult) -> list[str]:
    names = ("executor", "compilation_mode", "max_num_batched_tokens", "block_size")
    return [
        f"- `{side}`: "
        + ", ".join(f"{name} {engine[name]}" for name in names)
        + "".join(f"; {line}" for line in engine["log"])
        for side, engine in model.engines.items()
    ]
