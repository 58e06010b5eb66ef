"""Which programs two others determine, and that all others are refused."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from rbln_backend.compiler.programs.derivation import DerivationError, SizedProgram, derive
from rbln_backend.compiler.programs.program import Program

Number = Callable[[int], int]


def program(
    size: int, number: Number, *, method: str = "view", binding: str = "input:x"
) -> Program:
    """Return ``x.view(size, -1)[:, number(size):].new_zeros(3)`` with its parts exchanged."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    rows = graph.call_method(method, (x, size, -1))
    cut = graph.call_function(operator.getitem, (rows, (slice(None), slice(number(size), None))))
    graph.output((graph.call_method("new_zeros", (cut, [3, size * 4])),))
    return Program(graph, (binding,))


def between(number: Number, sizes: tuple[int, int, int] = (2, 8, 64)) -> Program:
    low, size, high = sizes
    ends = [SizedProgram(program(end, number), (end, 1)) for end in (low, high)]
    return derive(ends[0], ends[1], (size, 1))


FITS: dict[str, Number] = {
    "constant": lambda _: 7,
    "zero": lambda _: 0,
    "multiple": lambda size: 12 * size,
    "negative multiple": lambda size: -size,
    "plus a constant": lambda size: size + 1,
    "less a constant": lambda size: size - 2,
    "at most": lambda size: min(size, 64),
    "at least": lambda size: max(size, 2),
}


@pytest.mark.parametrize("number", FITS.values(), ids=FITS)
def test_integers_are_derived_from_the_size(number: Number) -> None:
    assert between(number).to_bytes() == program(8, number).to_bytes()


OTHERS: dict[str, Number] = {
    "square": lambda size: size * size,
    "cube": lambda size: size**3,
    "rounded up": lambda size: -(-size // 16) * 16,
    "quotient": lambda size: -(-size // 16),
    "bounded": lambda size: min(size, 16),
    "multiple and constant": lambda size: 4 * size + 3,
    "length": lambda size: size.bit_length(),
}


@pytest.mark.parametrize("number", OTHERS.values(), ids=OTHERS)
def test_other_integers_are_not_derived(number: Number) -> None:
    with pytest.raises(DerivationError):
        between(number)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ({"method": "view"}, {"method": "reshape"}),
        ({"binding": "input:x"}, {"binding": "input:y"}),
        ({"method": "item"}, {"method": "item"}),
    ],
)
def test_programs_that_differ_or_read_values_determine_none(
    low: dict[str, str], high: dict[str, str]
) -> None:
    ends = program(2, lambda _: 0, **low), program(64, lambda _: 0, **high)
    with pytest.raises(DerivationError):
        derive(SizedProgram(ends[0], (2,)), SizedProgram(ends[1], (64,)), (8,))


def test_no_size_outside_is_derived() -> None:
    with pytest.raises(DerivationError, match="128 is not between 2 and 64"):
        between(lambda _: 0, (2, 128, 64))


def test_two_sizes_must_agree_on_an_integer() -> None:
    """32 to 128 may be the tokens of a chunk, or 16 for each of its prompts."""
    low = SizedProgram(program(32, lambda _: 0), (32, 2))
    high = SizedProgram(program(128, lambda _: 0), (128, 8))
    derived = derive(low, high, (64, 4))
    assert derived.to_bytes() == program(64, lambda _: 0).to_bytes()
    with pytest.raises(DerivationError, match="32 and 128 give"):
        derive(low, high, (64, 3))


def test_another_order_of_results_is_refused() -> None:
    def pair(size: int, *, swapped: bool) -> Program:
        graph = fx.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        first, second = (y, x) if swapped else (x, y)
        rows = graph.call_method("view", (first, size, -1))
        graph.output((graph.call_function(torch.add, (rows, second)),))
        return Program(graph, ("input:x", "input:y"))

    low, high = pair(2, swapped=False), pair(64, swapped=True)
    with pytest.raises(DerivationError, match="is read where"):
        derive(SizedProgram(low, (2,)), SizedProgram(high, (64,)), (8,))
