"""Derivation of a program of one size from the programs of a smaller and a larger size.

Programs of one phase differ in few integers: those that stand for the size. An integer is derived
only if it has one of these forms in both programs, and if all forms that it has agree on it:

* equal in both,
* a whole multiple of a size, in both the same,
* a size plus a constant.

Nothing else is interpolated: two points also fit a line through the squares of a size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from rbln_backend.compiler.programs.program import Program

Sizes = tuple[int, ...]
"""The integers that distinguish the programs of a phase, such as requests and tokens."""

_Items = TypeVar("_Items", list[Any], tuple[Any, ...])


class DerivationError(ValueError):
    """Two programs do not determine the one between them."""


@dataclass(frozen=True, slots=True)
class SizedProgram:
    """A program and its sizes."""

    program: Program
    sizes: Sizes


def derive(low: SizedProgram, high: SizedProgram, sizes: Sizes) -> Program:
    """Return the program of ``sizes``; each is between those of ``low`` and ``high``.

    Raises ``DerivationError`` if the programs differ in more than integers, if an integer has none
    of the forms above, or if a program reads a value, on which sizes may depend.
    """
    for least, size, most in zip(low.sizes, sizes, high.sizes, strict=True):
        if not least <= size <= most:
            raise DerivationError(f"{size} is not between {least} and {most}")
    if low.program.bindings != high.program.bindings:
        raise DerivationError("the programs read different tensors")
    nodes = list(low.program.graph.nodes), list(high.program.graph.nodes)
    if len(nodes[0]) != len(nodes[1]):
        raise DerivationError(f"the programs have {len(nodes[0])} and {len(nodes[1])} nodes")
    between = _Between(low.sizes, high.sizes, sizes)
    graph = fx.Graph()
    for one, other in zip(*nodes, strict=True):
        between.add(graph, one, other)
    return Program(graph, low.program.bindings)


class _Between:
    """Derives nodes of a new graph from pairs of nodes, in order."""

    def __init__(self, low: Sizes, high: Sizes, sizes: Sizes) -> None:
        self._sizes = [(a, b, size) for a, b, size in zip(low, high, sizes, strict=True) if a != b]
        self._made: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}

    def add(self, graph: fx.Graph, low: fx.Node, high: fx.Node) -> None:
        """Append the node between ``low`` and ``high``."""
        if (low.op, low.target) != (high.op, high.target):
            raise DerivationError(f"the programs call {low.target} and {high.target} in one place")
        if low.op == "call_method" and low.target == "item":
            raise DerivationError("the program reads a value")
        made = graph.create_node(
            low.op,
            low.target,
            self._value(tuple(low.args), tuple(high.args)),
            self._keywords(low.kwargs, high.kwargs),
            name=low.name,
        )
        self._made[low] = made, high

    def _keywords(self, low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
        if list(low) != list(high):
            raise DerivationError(f"keywords {list(low)} and {list(high)}")
        return {name: self._value(low[name], high[name]) for name in low}

    def _value(self, low: Any, high: Any) -> Any:
        if isinstance(low, fx.Node):
            return self._node(low, high)
        # fx keeps lists as a class of its own.
        if isinstance(low, list) and isinstance(high, list):
            return self._items(list(low), list(high))
        if type(low) is not type(high):
            raise DerivationError(f"{low!r} and {high!r}")
        if isinstance(low, tuple):
            return self._items(low, high)
        if isinstance(low, slice):
            parts = (low.start, low.stop, low.step), (high.start, high.stop, high.step)
            return slice(*self._items(*parts))
        if type(low) is int:
            return self._integer(low, high)
        if low != high:
            raise DerivationError(f"{low!r} and {high!r}")
        return low

    def _node(self, low: fx.Node, high: Any) -> fx.Node:
        made, twin = self._made[low]
        if high is not twin:
            raise DerivationError(f"{low.name} is read where {high} is")
        return made

    def _items(self, low: _Items, high: _Items) -> _Items:
        if len(low) != len(high):
            raise DerivationError(f"{low!r} and {high!r}")
        return type(low)(self._value(a, b) for a, b in zip(low, high, strict=True))

    def _integer(self, low: int, high: int) -> int:
        if low == high:
            return low
        found = set()
        for least, most, size in self._sizes:
            if low % least == 0 and low // least * most == high:
                found.add(low // least * size)
            if high - low == most - least:
                found.add(low + size - least)
        if len(found) != 1:
            raise DerivationError(f"{low} and {high} give {sorted(found) or 'no size'}")
        return found.pop()
