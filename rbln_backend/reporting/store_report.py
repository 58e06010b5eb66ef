"""Reports on stored graphs and kernels of a configuration; plain data, no torch, no vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GraphState = Literal["stored", "missing", "damaged"]
KernelState = Literal["stored", "missing", "not needed", "impossible"]


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph that a start would load or compile, with the digest of its cache key."""

    name: str
    digest: str
    state: GraphState


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between the stored keys and those of `graphs`, one line per field."""

    graphs: tuple[str, ...]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelReport:
    """State of the emulated device's kernel library on this host.

    `keys` identify all libraries of this version, this host's first; `targets` are the CPUs for
    which the store has libraries.
    """

    state: KernelState
    detail: str
    keys: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Stored and missing artifacts of a start."""

    cache_root: str
    graphs: tuple[PlannedGraph, ...]
    differences: tuple[Difference, ...]
    kernels: KernelReport

    @property
    def to_compile(self) -> tuple[str, ...]:
        """Graphs that a start would compile."""
        return tuple(graph.name for graph in self.graphs if graph.state != "stored")

    @property
    def is_warm(self) -> bool:
        """True if a start would neither compile a graph nor build kernels."""
        return not self.to_compile and self.kernels.state in ("stored", "not needed")

    def to_dict(self) -> dict[str, object]:
        """Return all fields as JSON values."""
        return {"warm": self.is_warm, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """Return the lines to print, the verdict first."""
        stored = len(self.graphs) - len(self.to_compile)
        verdict = "warm" if self.is_warm else "cold" if not stored else "partly cold"
        found = [
            f"{verdict}: {stored} of {len(self.graphs)} graphs are in {self.cache_root}",
            f"  kernels: {self.kernels.detail}",
        ]
        found += [f"  {graph.name}: {graph.state}" for graph in self.graphs]
        for difference in self.differences:
            found.append(f"  nearest to {', '.join(difference.graphs)} in the store, what differs:")
            found += [f"    {line}" for line in difference.lines]
        return found


@dataclass(frozen=True, slots=True)
class CompileReport:
    """Result of `rbln-serve compile`: names of graphs, with the rank if there are several."""

    cache_root: str
    compiled: tuple[str, ...]
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    kernels: tuple[str, ...]

    @classmethod
    def of_ranks(
        cls,
        cache_root: str,
        ranks: Sequence[tuple[dict[str, str], Sequence[str]]],
        kernels: Sequence[str],
    ) -> CompileReport:
        """Combine the ranks' results by graph, and their graphs that were not stored."""
        results: dict[str, str] = {}
        missing: list[str] = []
        for rank, (made, lost) in enumerate(ranks):
            prefix = f"rank {rank} " if len(ranks) > 1 else ""
            results |= {prefix + name: result for name, result in made.items()}
            missing += [prefix + name for name in lost]
        return cls(
            cache_root=cache_root,
            compiled=tuple(name for name, result in results.items() if result == "compiled"),
            loaded=tuple(name for name, result in results.items() if result == "loaded"),
            missing=tuple(missing),
            kernels=tuple(kernels),
        )

    def to_dict(self) -> dict[str, object]:
        """Return all fields as JSON values."""
        return dataclasses.asdict(self)
