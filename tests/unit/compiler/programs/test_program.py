"""Programs as data: what goes in comes out."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from rbln_backend.errors import CompileError
from rbln_backend.graphs.call_list import CallList
from rbln_backend.graphs.program import Program


def sample() -> Program:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    hidden = graph.call_function(torch._C._nn.linear, (x, weight, None))
    halves = graph.call_method("split", (hidden, [2, 2]), {"dim": -1})
    first = graph.call_function(operator.getitem, (halves, 0))
    sliced = graph.call_function(operator.getitem, (first, (Ellipsis, slice(0, 1, None))))
    cast = graph.call_method("to", (sliced, torch.float64))
    scaled = graph.call_function(operator.mul, (cast, 0.1))
    graph.output((scaled, first))
    return Program(graph, ("input:x", "param:w"))


def run(program: Program, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    result: tuple[torch.Tensor, ...] = CallList(program.graph)(*args)
    return result


def test_round_trip_computes_the_same() -> None:
    program = sample()
    rebuilt = Program.from_bytes(program.to_bytes())
    x, weight = torch.randn(3, 5), torch.randn(4, 5)
    expected, actual = run(program, x, weight), run(rebuilt, x, weight)
    assert rebuilt.bindings == ("input:x", "param:w")
    assert actual[0].dtype == torch.float64
    for left, right in zip(expected, actual, strict=True):
        assert torch.equal(left, right)


def test_bytes_are_deterministic() -> None:
    assert sample().to_bytes() == sample().to_bytes()


@pytest.mark.parametrize("target", [torch.load, torch.from_file, eval, print])
def test_an_operator_off_the_list_cannot_be_stored(target: Any) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"),)))
    with pytest.raises(CompileError, match="cannot be stored"):
        Program(graph, ("input:x",)).to_bytes()


def test_a_call_that_could_not_be_loaded_is_not_stored() -> None:
    """Else a start would store it, and every later one would take it for damaged."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.abs, (x,), {"out": x}),))
    with pytest.raises(CompileError, match=r"node 1 .*torch\.abs has no argument 'out'"):
        Program(graph, ("input:x",)).to_bytes()
