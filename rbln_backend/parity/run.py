"""One parity run: the reference first, then the RBLN path along its tokens, then the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rbln_backend.host.child_process import ChildJob
from rbln_backend.parity.announcement import heading, launch
from rbln_backend.parity.bisect import Departure, LayerDelta, first_departure, layer_deltas
from rbln_backend.parity.job import Job, Side, SideResult
from rbln_backend.parity.jobs import Jobs, environ_of
from rbln_backend.parity.options import Options
from rbln_backend.parity.positions import PromptDelta, Summary, compare, summarize
from rbln_backend.parity.result_cache import ResultCache, result_key
from rbln_backend.parity.verdict import Failure, judge

# Tokens that a probe decodes one by one: at least two, so that a step reads what a step wrote.
_MIN_DECODED = 2
_MAX_DECODED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides compared; ``deltas`` by prompt."""

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
    """Everything that a report tells."""

    options: Options
    results: dict[Side, SideResult]
    pairs: tuple[Comparison, ...]
    """The judged pair, reference and RBLN path, comes first."""
    failures: tuple[Failure, ...]
    clamped: tuple[str, ...] = ()
    """Values that are not the command line's, in words."""
    bisection: Bisection | None = None

    @property
    def departure(self) -> Departure | None:
        """The first layer that differs; None if none does or layers were not compared."""
        return None if self.bisection is None else self.bisection.departure

    @property
    def reasons(self) -> tuple[str, ...]:
        """All that is out of limits, in words."""
        departed = () if self.departure is None else (self.departure,)
        return tuple(map(str, (*self.failures, *departed)))

    @property
    def passed(self) -> bool:
        return not self.reasons


def run_parity(options: Options, tell: Callable[[str], None]) -> Outcome:
    """Run the sides and compare them; ``tell`` is given a line at each step of it.

    Raises ``ConfigError`` and ``ChildError``.
    """
    jobs = Jobs(options)
    tell(heading(options, jobs.model))
    for words in jobs.clamped:
        tell(f"[main] {words}")
    sides = _Sides(options, tell)
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


class _Sides:
    """Runs the sides, each in a process of its own and a clean environment."""

    def __init__(self, options: Options, tell: Callable[[str], None]) -> None:
        self._options, self._tell = options, tell

    def run(self, job: Job) -> SideResult:
        """Raises ``ChildError``."""
        environ = environ_of(job.side)
        for line in launch(job.side, environ):
            self._tell(line)
        child = ChildJob(
            label=f"{job.side} side",
            module="rbln_backend.parity.runners",
            variables=environ,
            timeout=self._options.timeout,
        )
        return child.run(job.write, SideResult.read)

    def reference(self, job: Job) -> SideResult:
        """A reference's result, kept and found again with ``--use-cache`` alone."""
        if not self._options.use_cache:
            return self.run(job)
        cache, key = ResultCache(self._options.cache_dir), result_key(job, environ_of(job.side))
        result = cache.load(key)
        if result is None:
            result = self.run(job)
            cache.store(key, result)
        else:
            self._tell(f"\n[main] {job.side.upper()} results are the kept ones, {cache.path(key)}")
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
    """Look at the first prompt and position that fail, else at the first prompt."""
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
