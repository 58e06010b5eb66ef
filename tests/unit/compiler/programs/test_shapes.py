"""A program is tried on the shapes of its inputs, without memory."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from rbln_backend.errors import CorruptArtifactError
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import as_meta, check_shapes

X, WEIGHT = torch.ones(3, 4), torch.ones(8, 4)


def program(*calls: tuple[Any, tuple[Any, ...]]) -> Program:
    """Calls one after the other over ``x`` and ``weight``; a number stands for an earlier value."""
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("weight")]
    for target, arguments in calls:
        given = tuple(values[x] if isinstance(x, int) else x for x in arguments)
        make = graph.call_method if isinstance(target, str) else graph.call_function
        values.append(make(target, given))
    graph.output((values[-1],))
    return Program(graph, ("input:x", "param:weight"))


def check(checked: Program) -> None:
    check_shapes(checked, [as_meta(X), as_meta(WEIGHT)])


def test_what_fits_passes_also_where_the_host_is_named() -> None:
    linear = torch.nn.functional.linear
    check(program((linear, (0, 1)), ("view", (2, (24,))), ("to", (3, torch.device("cpu")))))
    made = torch.full, ((3, 4), 1.0)
    check(program(made, (torch.add, (2, 0))))


@pytest.mark.parametrize(
    "calls",
    [
        [(torch.nn.functional.linear, (1, 0)), (torch.add, (2, 1))],
        [("view", (0, (5, 5)))],
        [(torch.cat, ((0, 1), "x"))],
        [(torch.gather, (0, 1, 1))],
    ],
)
def test_what_does_not_fit_is_named(calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    with pytest.raises(CorruptArtifactError, match=r"\w+ does not fit its arguments: "):
        check(program(*calls))


def test_a_sequence_is_neither_repeated_nor_returned() -> None:
    """Python would make a tuple of 10 billion entries."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("weight")
    rows = graph.call_method("unbind", (x,))
    graph.output((graph.call_function(operator.mul, (rows, 10**10)),))
    with pytest.raises(CorruptArtifactError, match="mul calculates with what is no tensor"):
        check(Program(graph, ("input:x", "param:weight")))
    with pytest.raises(CorruptArtifactError, match="the output is not a sequence of tensors"):
        check(program(("unbind", (0,))))


def test_growth_is_bounded_and_takes_no_memory() -> None:
    """Forty doublings of 48 bytes would be 50 TB."""
    graph = fx.Graph()
    value, weight = graph.placeholder("x"), graph.placeholder("weight")
    for _ in range(40):
        value = graph.call_function(torch.cat, ([value, value],))
    graph.output((value, weight))
    with pytest.raises(CorruptArtifactError, match=r"cat_\d+ makes \d+ bytes; at most"):
        check(Program(graph, ("input:x", "param:weight")))


def test_a_program_that_reads_a_value_is_left_to_its_first_run() -> None:
    check(program(("item", (0,)), (torch.add, (0, 2))))
