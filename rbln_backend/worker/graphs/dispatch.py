"""The compiled graphs by graph spec, and the policy for unknown ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.core import GraphSpec
from rbln_backend.errors import UncompiledShapeError


class GraphDispatch:
    """Table of the compiled graphs. Once sealed, an unknown shape is a hot-path compile.

    Policy ``error`` rejects it, ``warn`` compiles it; both call ``on_miss``.
    """

    def __init__(
        self,
        compile_graph: Callable[[GraphSpec], CompiledGraph],
        *,
        policy: Literal["error", "warn"],
        on_miss: Callable[[GraphSpec], None],
    ) -> None:
        self._compile = compile_graph
        self._policy = policy
        self._on_miss = on_miss
        self._graphs: dict[GraphSpec, CompiledGraph] = {}
        self._sealed = False

    @property
    def specs(self) -> list[GraphSpec]:
        return sorted(self._graphs)

    def add(self, graph: CompiledGraph) -> None:
        self._graphs[graph.spec] = graph

    def seal(self) -> None:
        """End the warm-up: from now on every shape must be known."""
        self._sealed = True

    def get(self, spec: GraphSpec) -> CompiledGraph:
        """Return the graph of ``spec``.

        Raises ``UncompiledShapeError`` for an unknown one, if sealed with policy ``error``.
        """
        graph = self._graphs.get(spec)
        if graph is not None:
            return graph
        if self._sealed:
            self._on_miss(spec)
            if self._policy == "error":
                raise UncompiledShapeError(
                    f"graph {spec} was not compiled at warm-up; compiled: "
                    f"{', '.join(map(str, self.specs)) or 'none'}"
                )
        graph = self._compile(spec)
        self._graphs[spec] = graph
        return graph
