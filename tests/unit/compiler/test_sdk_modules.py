"""The module that the SDK is given: a graph module in all that it is used for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rbln_backend.devices.rebel.modules import module_of
from rbln_backend.graphs.program import Program

INPUTS = (torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
WANTED = torch.tensor([12.0, 24.0])


@pytest.fixture
def module() -> fx.GraphModule:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    doubled = graph.call_method("mul", (x, 2))
    graph.output((graph.call_function(torch.add, (doubled, weight)),))
    return module_of(Program(graph, ("input:x", "param:weight")), INPUTS, None)


def exported(module: fx.GraphModule) -> Callable[..., Any]:
    return torch.export.export(module, INPUTS, strict=False).module()


def strictly_exported(module: fx.GraphModule) -> Callable[..., Any]:
    return torch.export.export(module, INPUTS, strict=True).module()


def symbolically_traced(module: fx.GraphModule) -> Callable[..., Any]:
    return fx.symbolic_trace(module)


def traced(module: fx.GraphModule) -> Callable[..., Any]:
    return make_fx(module)(*INPUTS)


def copied(module: fx.GraphModule) -> Callable[..., Any]:
    found = copy.deepcopy(module)
    assert isinstance(found, fx.GraphModule)
    assert found.graph is not module.graph
    return found


def interpreted(module: fx.GraphModule) -> Callable[..., Any]:
    return fx.Interpreter(module).run


def generated(module: fx.GraphModule) -> Callable[..., Any]:
    return fx.GraphModule(module, module.graph)


def as_it_is(module: fx.GraphModule) -> Callable[..., Any]:
    return module


USES = [
    *(as_it_is, copied, interpreted, generated),
    *(exported, strictly_exported, traced, symbolically_traced),
]


@pytest.mark.parametrize("use", USES)
def test_a_compiler_can_use_it_as_any_graph_module(
    use: Callable[[fx.GraphModule], Callable[..., Any]], module: fx.GraphModule
) -> None:
    (result,) = use(module)(*INPUTS)
    assert torch.equal(result, WANTED)


def test_ops_have_the_names_that_dynamo_gives() -> None:
    """Also those of a stored program, which names overloads."""
    ids, table = torch.tensor([1, 0]), torch.randn(3, 2)

    def lookup(ids: Tensor, table: Tensor) -> tuple[Tensor]:
        return (torch.ops.aten.embedding(table, ids),)

    targets: list[list[Any]] = []

    def take(given: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        targets.append([node.target for node in given.graph.nodes if node.op == "call_function"])
        return given.forward

    torch.compile(lookup, backend=take)(ids, table)
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    graph.output((graph.call_function(torch.ops.aten.embedding.default, (weight, x)),))
    stored = Program.from_bytes(Program(graph, ("input:x", "param:weight")).to_bytes())
    calls = [n for n in module_of(stored, INPUTS, None).graph.nodes if n.op == "call_function"]
    assert [node.target for node in calls] == targets[0]


def test_a_change_of_its_graph_is_followed(module: fx.GraphModule) -> None:
    other = copy.deepcopy(module)
    for node in module.graph.nodes:
        if node.target is torch.add:
            node.target = torch.sub
    module.recompile()
    assert torch.equal(module(*INPUTS)[0], torch.tensor([-8.0, -16.0]))
    assert torch.equal(other(*INPUTS)[0], WANTED), "a copy has calls of its own"
