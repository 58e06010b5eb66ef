"""Adaptable layers, and the shapes of their matrices in an adapter's file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Shape(NamedTuple):
    """A matrix over all ranks, in elements."""

    inputs: int
    outputs: int


class Pair(NamedTuple):
    """The shapes of a lora_A and its lora_B."""

    a: tuple[int, ...]
    b: tuple[int, ...]


class Target(NamedTuple):
    """A linear layer, or (``experts``) one matrix of every expert of a layer in a single pair.

    PEFT names a stack of experts' matrices by the module that holds several of them
    (``target_parameters``); the shapes in the file identify the matrix.
    """

    shapes: tuple[Shape, ...]
    experts: int = 1

    @classmethod
    def linear(cls, inputs: int, outputs: int) -> Target:
        """Return the target of one matrix of [outputs, inputs]."""
        return cls((Shape(inputs, outputs),))

    @classmethod
    def from_lists(cls, shapes: Iterable[Iterable[int]], experts: int) -> Target:
        """Return a target from shapes as lists, as they come from JSON."""
        return cls(tuple(Shape(*shape) for shape in shapes), experts)

    def pairs(self, rank: int) -> list[Pair]:
        """Return the shapes that a file at ``rank`` must have, in the order of ``shapes``."""
        total = rank * self.experts
        return [Pair((total, shape.inputs), (shape.outputs, total)) for shape in self.shapes]

    def misfit(self, shape: Iterable[int], rank: int, *, is_a: bool) -> str | None:
        """Return the accepted shapes as text, or None if ``shape`` is one of them."""
        wanted = [pair.a if is_a else pair.b for pair in self.pairs(rank)]
        if tuple(shape) in wanted:
            return None
        return " or ".join(str(list(each)) for each in dict.fromkeys(wanted))

    def weight_misfit(self, shape: Iterable[int]) -> str | None:
        """Return the shape of the layer's only weight as text, or None if ``shape`` is that."""
        (weight,) = self.shapes
        wanted = [weight.outputs, weight.inputs]
        return None if list(shape) == wanted else str(wanted)
