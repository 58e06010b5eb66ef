"""One parity run: the reference, the RBLN path along its tokens, and the comparison.

Differences at every generated position, the verdict on them, and the first layer that departs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from rbln_backend.host.processes import run_child
from rbln_backend.parity.jobs import (
    Answer,
    FloatArray,
    IntArray,
    Job,
    Jobs,
    Layers,
    Side,
    SideResult,
    get_environ,
)
from rbln_backend.parity.options import Limits, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionDelta:
    """Differences of log-probabilities at one position, over the tokens that both sides have."""

    overlap: int
    outliers: int
    """|difference| >= eps."""
    max_delta: float
    mean_delta: float
    pearson: float
    """NaN for fewer than two tokens, or for equal values of all tokens on one side."""
    same_best: bool
    margin: float
    """The reference's best log-probability less its second best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelta:
    """Differences of one prompt at every position, each after the same tokens on both sides."""

    positions: tuple[PositionDelta, ...]
    first_divergence: int | None
    """Position at which the free continuations differ; None if they are equal."""

    @property
    def divergence_is_a_tie(self) -> bool:
        """True if the reference's margin is at most the difference between the runners."""
        if self.first_divergence is None or not self.positions:
            return False
        position = self.positions[self.first_divergence]
        return position.margin <= 2 * position.max_delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary over all prompts of two sides; ``None`` without compared log-probabilities."""

    prompts: int
    positions: int
    same_tokens: int
    """Prompts with equal free continuations."""
    ties: int
    """Prompts that differ at a tie of the reference."""
    max_delta: float | None
    mean_delta: float | None
    min_pearson: float | None
    outliers: int


def compare(reference: Answer, other: Answer, eps: float) -> PromptDelta:
    """Compare two answers to one prompt; ``other`` followed the reference's tokens."""
    count = min(len(reference.top_ids), len(other.top_ids))
    has_logprobs = count > 0 and reference.top_ids.shape[1] > 0 and other.top_ids.shape[1] > 0
    positions = (
        tuple(
            compare_position(
                reference.top_ids[at],
                reference.logprobs[at],
                other.top_ids[at],
                other.logprobs[at],
                eps,
            )
            for at in range(count)
        )
        if has_logprobs
        else ()
    )
    both = min(len(reference.token_ids), len(other.token_ids))
    differs = np.nonzero(reference.token_ids[:both] != other.token_ids[:both])[0]
    first = int(differs[0]) if len(differs) else None
    return PromptDelta(positions=positions, first_divergence=first)


def compare_position(
    ref_ids: IntArray, ref: FloatArray, ids: IntArray, values: FloatArray, eps: float
) -> PositionDelta:
    """Compare ``ref_ids``, ``ref`` [N] with ``ids``, ``values`` [M], likeliest first."""
    _, at_ref, at = np.intersect1d(ref_ids, ids, return_indices=True)
    a, b = ref[at_ref].astype(np.float64), values[at].astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    delta = np.abs(a - b)
    return PositionDelta(
        overlap=len(delta),
        outliers=int((delta >= eps).sum()),
        max_delta=float(delta.max(initial=0.0)),
        mean_delta=float(delta.mean()) if len(delta) else float("nan"),
        pearson=_pearson(a, b),
        same_best=bool(ref_ids[0] == ids[0]),
        margin=float(ref[0] - ref[1]) if len(ref) > 1 else float("inf"),
    )


def _pearson(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A limit that a prompt exceeds, and the first position that does."""

    prompt: int
    position: int
    reason: str

    def __str__(self) -> str:
        return f"prompt {self.prompt}, position {self.position}: {self.reason}"


def judge(deltas: Sequence[PromptDelta], limits: Limits) -> list[Failure]:
    """Return the failures, at most one per prompt and limit."""
    failures = []
    for prompt, delta in enumerate(deltas):
        seen: set[str] = set()
        for index, position in enumerate(delta.positions):
            for kind, reason in _of_position(position, limits):
                if kind not in seen:
                    seen.add(kind)
                    failures.append(Failure(prompt=prompt, position=index, reason=reason))
        at = delta.first_divergence
        if at is None or (delta.positions and delta.divergence_is_a_tie):
            continue
        reason = "another token where the reference was decided"
        if delta.positions:
            position = delta.positions[at]
            reason += f": the reference's margin is {position.margin:.3g}, "
            reason += f"the largest difference {position.max_delta:.3g}"
        failures.append(Failure(prompt=prompt, position=at, reason=reason))
    return failures


def _of_position(position: PositionDelta, limits: Limits) -> Iterator[tuple[str, str]]:
    if position.overlap == 0:
        yield "overlap", "the sides name no token in common"
        return
    if not math.isnan(position.pearson) and position.pearson < limits.min_pearson:
        yield "pearson", f"Pearson {position.pearson:.4f} is below {limits.min_pearson}"
    if position.mean_delta > limits.max_mean_delta:
        yield "mean", f"mean |delta| {position.mean_delta:.4f} is above {limits.max_mean_delta}"
    share = position.outliers / position.overlap
    if share > limits.max_outlier_share:
        yield (
            "outliers",
            (
                f"{position.outliers} of {position.overlap} tokens differ by {limits.eps} or more, "
                f"above a share of {limits.max_outlier_share}"
            ),
        )


# A layer departs where its relative error is above what the dtype explains and this many times
# the error of the layer before it. Rounding grows by some tens of percent a layer.
JUMP = 4.0
# Relative error that rounding alone reaches after some layers, with room.
ROUNDING = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDelta:
    """||state - reference|| / ||reference|| over the rows of a phase."""

    name: str
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Layer and phase at which the sides depart."""

    layer: str
    phase: Phase
    error: float
    error_before: float

    def __str__(self) -> str:
        return (
            f"{self.layer} departs in {self.phase}: relative error {self.error:.3g}, "
            f"{self.error_before:.3g} before it"
        )


def layer_deltas(reference: Layers, other: Layers, num_decoded: int) -> list[LayerDelta]:
    """Compare all layers; raises ``ValueError`` if the shapes of the sides differ."""
    if reference.states.shape != other.states.shape:
        raise ValueError(
            f"the sides' layers differ: {reference.states.shape} and {other.states.shape}"
        )
    split = reference.states.shape[1] - num_decoded
    return [
        LayerDelta(
            name=name,
            prefill=_relative(ref[:split], state[:split]),
            decode=_relative(ref[split:], state[split:]),
        )
        for name, ref, state in zip(other.names, reference.states, other.states, strict=True)
    ]


def first_departure(deltas: Sequence[LayerDelta], dtype: str) -> Departure | None:
    """Return the earliest layer that departs, in the phase with the larger error."""
    floor = ROUNDING.get(dtype, ROUNDING["bfloat16"])
    before = {"prefill": floor / JUMP, "decode": floor / JUMP}
    for delta in deltas:
        phase: Phase = "prefill" if delta.prefill >= delta.decode else "decode"
        error = getattr(delta, phase)
        if error > max(floor, JUMP * before[phase]):
            return Departure(layer=delta.name, phase=phase, error=error, error_before=before[phase])
        before = {"prefill": delta.prefill, "decode": delta.decode}
    return None


def _relative(reference: FloatArray, other: FloatArray) -> float:
    norm = float(np.linalg.norm(reference))
    error = float(np.linalg.norm(other - reference)) / norm if norm else 0.0
    # NaN counts as an infinite error.
    return error if np.isfinite(error) else float("inf")


# Tokens that a probe decodes one by one: at least two, so that a step reads the cache of another.
_MIN_DECODED = 2
_MAX_DECODED = 16
# Of `--use-cache`, as documented.
_CACHE = Path("cache")
# Variables that distinguish the sides.
_VARIABLES: Mapping[Side, tuple[str, ...]] = {
    "cpu": ("VLLM_PLUGINS",),
    "rbln": ("VLLM_PLUGINS", "RBLN_KERNEL_MODE", "VLLM_DISABLE_COMPILE_CACHE"),
    "transformers": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of two sides; ``deltas`` by prompt."""

    base: Side
    other: Side
    deltas: tuple[PromptDelta, ...]

    @property
    def summary(self) -> Summary:
        positions = [position for delta in self.deltas for position in delta.positions]
        overlaps = [position.overlap for position in positions]
        total = sum(p.mean_delta * p.overlap for p in positions if p.overlap)
        correlations = (p.pearson for p in positions if not math.isnan(p.pearson))
        return Summary(
            prompts=len(self.deltas),
            positions=len(positions),
            same_tokens=sum(delta.first_divergence is None for delta in self.deltas),
            ties=sum(delta.divergence_is_a_tie for delta in self.deltas),
            max_delta=max((p.max_delta for p in positions), default=None),
            mean_delta=total / sum(overlaps) if any(overlaps) else None,
            min_pearson=min(correlations, default=None),
            outliers=sum(p.outliers for p in positions),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    reference: Side
    prompt: int
    num_tokens: int
    num_decoded: int
    layers: tuple[LayerDelta, ...]
    departure: Departure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    options: Options
    results: dict[Side, SideResult]
    pairs: tuple[Comparison, ...]
    """The first one, of reference and RBLN path, decides the verdict."""
    failures: tuple[Failure, ...]
    clamped: tuple[str, ...] = ()
    """Changed values of the command line, one message each."""
    bisection: Bisection | None = None

    @property
    def departure(self) -> Departure | None:
        """The first layer that differs; None if none does or layers were not compared."""
        return None if self.bisection is None else self.bisection.departure

    @property
    def reasons(self) -> tuple[str, ...]:
        """Messages on exceeded limits."""
        departed = () if self.departure is None else (self.departure,)
        return tuple(map(str, (*self.failures, *departed)))

    @property
    def passed(self) -> bool:
        return not self.reasons


def run_parity(options: Options, log: Callable[[str], None]) -> Outcome:
    """Run the sides and compare them; ``log`` gets a line at each step.

    Raises ``ConfigError`` and ``ChildError``.
    """
    jobs = Jobs(options)
    log(heading(options, jobs.model))
    for words in jobs.clamped:
        log(f"[main] {words}")
    sides = _Sides(options, log)
    reference = options.reference
    results: dict[Side, SideResult] = {reference: sides.reference(jobs.generate(reference))}
    forced = [answer.token_ids.tolist() for answer in results[reference].answers]
    results["rbln"] = sides.run(jobs.generate("rbln", forced))
    pairs = [_pair(results, reference, "rbln", options)]
    if options.transformers and reference != "transformers":
        results["transformers"] = sides.reference(jobs.generate("transformers", forced))
        pairs += [_pair(results, "transformers", side, options) for side in (reference, "rbln")]
    failures = tuple(judge(pairs[0].deltas, options.limits))
    bisection = _bisect(jobs, options, sides, results, failures) if options.bisect else None
    return Outcome(
        options=options,
        results=results,
        pairs=tuple(pairs),
        failures=failures,
        clamped=tuple(jobs.clamped),
        bisection=bisection,
    )


def heading(options: Options, model: str) -> str:
    """Return the first line of the documented runner; ``model`` is the resolved name."""
    return (
        f"Model = {model}, EP={options.ep}, TP={options.tp}, PP={options.pp}, DP={options.dp}, "
        f"MaxTokens={options.max_tokens}, Logprobs={options.logprobs}, "
        f"Prompts={len(options.prompts)}"
    )


def launch(side: Side, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the documented runner before a side starts in ``environ``."""
    yield f"\n[main] Launching {side.upper()} worker…"
    for name in _VARIABLES[side]:
        yield f"[{side}] {name} = {environ.get(name, '<unset>')}"


class _Sides:
    """Runs each side in a child process with a clean environment."""

    def __init__(self, options: Options, log: Callable[[str], None]) -> None:
        self._options, self._log = options, log

    def run(self, job: Job) -> SideResult:
        """Run a side; raises ``ChildError``."""
        environ = get_environ(job.side)
        for line in launch(job.side, environ):
            self._log(line)
        return run_child(
            "rbln_backend.parity",
            job.write,
            SideResult.read,
            label=f"{job.side} side",
            variables=environ,
            timeout=self._options.timeout,
        )

    def reference(self, job: Job) -> SideResult:
        """Return the result of a reference, with ``--use-cache`` that of an equal job if kept."""
        if not self._options.use_cache:
            return self.run(job)
        path = _CACHE / f"reference-{hashlib.sha256(job.encoded()).hexdigest()[:32]}.npz"
        if path.is_file():
            self._log(f"\n[main] {job.side.upper()} results are the cached ones, {path}")
            return SideResult.read(path)
        result = self.run(job)
        _CACHE.mkdir(exist_ok=True)
        result.write(path)
        return result


def _pair(results: dict[Side, SideResult], base: Side, other: Side, options: Options) -> Comparison:
    both = zip(results[base].answers, results[other].answers, strict=True)
    deltas = tuple(compare(a, b, options.limits.eps) for a, b in both)
    return Comparison(base=base, other=other, deltas=deltas)


def _bisect(
    jobs: Jobs,
    options: Options,
    sides: _Sides,
    results: dict[Side, SideResult],
    failures: Sequence[Failure],
) -> Bisection:
    """Compare layers at the first failing prompt and position, else at the first prompt."""
    worst = failures[0] if failures else None
    prompt = worst.prompt if worst else 0
    reference: Side = "transformers" if options.transformers else options.reference
    answer = results[options.reference].answers[prompt]
    wanted = max(_MIN_DECODED, min(_MAX_DECODED, worst.position if worst else 0))
    count = min(wanted, len(answer.token_ids))
    token_ids = [*answer.prompt_ids.tolist(), *answer.token_ids[:count].tolist()]
    both: tuple[Side, Side] = (reference, "rbln")
    text = options.prompts[prompt]
    layers = [sides.run(jobs.probe(side, text, token_ids, count)).layers for side in both]
    assert layers[0] is not None and layers[1] is not None
    deltas = layer_deltas(layers[0], layers[1], count)
    dtype = str(results["rbln"].about["dtype"])
    return Bisection(
        reference=reference,
        prompt=prompt,
        num_tokens=len(token_ids),
        num_decoded=count,
        layers=tuple(deltas),
        departure=first_departure(deltas, dtype),
    )
