"""Which of the missing graphs are traced, and which are derived from two traced ones.

Of the sizes of a phase, the smallest and the largest are traced. If they do not determine the sizes
between them, the middle one is traced as well, and so on for both halves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain, pairwise

from rbln_backend.compiler.programs.derivation import (
    DerivationError,
    SizedProgram,
    Sizes,
    derive,
)
from rbln_backend.compiler.programs.program import Program
from rbln_backend.core import GraphSpec
from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.vllm_compat.surface import init_logger

logger = init_logger(__name__)

Check = Callable[[GraphSpec, Program], None]
"""Raises ``CompileError`` or ``CorruptArtifactError`` for a program that does not fit its graph."""


class TracePlan:
    """Turns traced programs into derived ones, and lists the graphs that have to be traced."""

    def __init__(self, specs: Sequence[GraphSpec], check: Check | None) -> None:
        """``check`` is called with each derived program; None: every graph is traced."""
        self._check = check
        self._programs: dict[GraphSpec, Program] = {}
        self._wanted: dict[GraphSpec, None] = {}
        self._series = [[spec] for spec in specs] if check is None else _series_of(specs)
        for series in self._series:
            self._wanted |= dict.fromkeys((series[0], series[-1]))

    @property
    def wanted(self) -> list[GraphSpec]:
        """Graphs to trace that have no program yet."""
        return [spec for spec in self._wanted if spec not in self._programs]

    def add(self, spec: GraphSpec, program: Program) -> Iterator[tuple[GraphSpec, Program]]:
        """Record the traced program of ``spec``, and yield all that are derived from it."""
        self._programs[spec] = program
        for series in self._series:
            if spec in series:
                yield from self._derive(series)

    def _derive(self, series: list[GraphSpec]) -> Iterator[tuple[GraphSpec, Program]]:
        traced = [place for place, spec in enumerate(series) if spec in self._wanted]
        for low, high in pairwise(traced):
            between = [x for x in series[low + 1 : high] if x not in self._programs]
            ends = series[low], series[high]
            if not between or not all(end in self._programs for end in ends):
                continue
            derived = self._between(*ends, between)
            if derived is None:
                self._wanted[between[len(between) // 2]] = None
                continue
            self._programs |= derived
            yield from derived.items()

    def _between(
        self, low: GraphSpec, high: GraphSpec, specs: Sequence[GraphSpec]
    ) -> dict[GraphSpec, Program] | None:
        """Return the programs of ``specs``, or None if one of them cannot be derived."""
        assert self._check is not None
        ends = self._sized(low), self._sized(high)
        found = {}
        try:
            for spec in specs:
                found[spec] = derive(*ends, _sizes(spec))
                self._check(spec, found[spec])
        except (DerivationError, CompileError, CorruptArtifactError) as error:
            logger.debug("Graphs between %s and %s are traced: %s", low, high, error)
            return None
        return found

    def _sized(self, spec: GraphSpec) -> SizedProgram:
        return SizedProgram(self._programs[spec], _sizes(spec))


def ends_of(specs: Sequence[GraphSpec]) -> list[GraphSpec]:
    """Return the smallest and the largest graph of each series: others may be derived of them."""
    ends = ((series[0], series[-1]) for series in _series_of(specs))
    return list(dict.fromkeys(chain.from_iterable(ends)))


def _series_of(specs: Sequence[GraphSpec]) -> list[list[GraphSpec]]:
    """Return the graphs that may determine each other, by size.

    A size of 1 stands apart: PyTorch broadcasts it, and ignores its stride.
    """
    series: defaultdict[Hashable, list[GraphSpec]] = defaultdict(list)
    for spec in sorted(specs):
        series[spec.phase_name, spec.length, *(size == 1 for size in _sizes(spec))].append(spec)
    return list(series.values())


def _sizes(spec: GraphSpec) -> Sizes:
    return spec.bucket, spec.prompts
