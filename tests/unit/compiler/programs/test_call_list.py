"""Graphs as lists of calls: the same results as generated source, and values freed when read."""

from __future__ import annotations

import gc
import operator
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from rbln_backend.errors import CompileError
from rbln_backend.graphs.call_list import CallList


def computation(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Calls of one to four arguments, keywords, sequences and slices that hold results."""
    rows = x.view(2, 6).split([2, 4], dim=-1)
    both = torch.cat([rows[1], rows[0], y], dim=1)
    position = both.argmax()
    picked = both[..., 0:2] + both[:, position % 2 :].sum()
    scaled = torch.add(picked, both[:, 2:4], alpha=0.5)
    last = torch.where(condition=scaled > 0, input=scaled, other=x.new_full((), -1.0))
    return torch.stack((last, scaled)).sum(), both.mul_(2), x.new_zeros(1, 2, 3)


def graph_of(function: Any = computation) -> fx.Graph:
    return fx.symbolic_trace(function).graph


def test_it_computes_what_generated_source_computes() -> None:
    graph = graph_of()
    generated, calls = fx.GraphModule({}, graph), CallList(graph)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(12), torch.randn(2, 3)
        expected, actual = generated(x.clone(), y.clone()), calls(x.clone(), y.clone())
        assert type(actual) is type(expected)
        for left, right in zip(expected, actual, strict=True):
            assert torch.equal(left, right)


def test_names_of_a_schema_are_passed_by_position() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    given = {"weight": weight, "input": x, "bias": None}
    graph.output((graph.call_function(torch.ops.aten.linear.default, (), given),))
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    assert torch.equal(CallList(graph)(x, weight)[0], torch.nn.functional.linear(x, weight))


def test_an_output_may_be_an_input() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([x, x])
    value = torch.ones(1)
    assert CallList(graph)(value) == [value, value]


def test_a_value_is_freed_when_it_was_read_last() -> None:
    """As generated source does; else a step would hold every tensor that it made."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def make(x: Tensor) -> Tensor:
        nonlocal most
        made = x + 1
        alive.append(weakref.ref(made))
        most = max(most, sum(value() is not None for value in alive))
        return made

    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(20):
        value = graph.call_function(make, (value,))
        graph.call_function(make, (value,))
    graph.output((value,))
    calls = CallList(graph)
    (result,) = calls(torch.zeros(1))
    assert float(result) == 20.0
    assert most == 2, "what is read and what is made"
    del result
    gc.collect()
    assert [value for value in alive if value() is not None] == []


def test_a_run_that_fails_leaves_nothing_behind() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(operator.add, (x, 1))
    graph.output((graph.call_function(operator.truediv, (total, x)),))
    calls = CallList(graph)
    with pytest.raises(ZeroDivisionError):
        calls(0)
    assert calls(2) == (1.5,)


@pytest.mark.parametrize("op", ["get_attr", "call_module"])
def test_a_graph_that_embeds_something_is_refused(op: str) -> None:
    graph = fx.Graph()
    graph.output((graph.create_node(op, "weight"),))
    with pytest.raises(CompileError, match="embeds 'weight'"):
        CallList(graph)


def test_no_source_is_compiled_or_executed() -> None:
    graph = graph_of()
    seen: list[str] = []
    listening = True

    def hear(event: str, _: object) -> None:
        if listening and event in ("compile", "exec"):
            seen.append(event)

    sys.addaudithook(hear)
    CallList(graph)(torch.randn(12), torch.randn(2, 3))
    assert seen == []
    fx.GraphModule({}, graph)
    listening = False
    assert "exec" in seen, "the hook hears what it is there for"
