"""One parity run: the reference, the RBLN path along its tokens, and the comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rbln_backend.host.child_process import ChildJob
from rbln_backend.parity.bisect import Departure, LayerDelta, first_departure, layer_deltas
from rbln_backend.parity.job import Job, Side, SideResult
from rbln_backend.parity.jobs import Jobs, environ_of
from rbln_backend.parity.options import Options
from rbln_backend.parity.positions import PromptDelta, Summary, compare, summarize
from rbln_backend.parity.verdict import Failure, judge

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
        return summarize(self.deltas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Result of a layer-by-layer comparison."""

    reference: Side
    prompt: int
    num_tokens: int
    num_decoded: int
    layers: tuple[LayerDelta, ...]
    departure: Departure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Content of the reports."""

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
        environ = environ_of(job.side)
        for line in launch(job.side, environ):
            self._log(line)
        child = ChildJob(
            label=f"{job.side} side",
            module="rbln_backend.parity.runners",
            variables=environ,
            timeout=self._options.timeout,
        )
        return child.run(job.write, SideResult.read)

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
