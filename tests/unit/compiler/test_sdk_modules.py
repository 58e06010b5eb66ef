"""The module that the SDK is given: a graph module in all that it is used for, run as calls."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from rbln_backend.compiler.programs.program import Program
from rbln_backend.compiler.sdk.modules import ProgramModule, module_of

INPUTS = (torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0]))
WANTED = torch.tensor([12.0, 24.0])


@pytest.fixture
def module() -> ProgramModule:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    doubled = graph.call_method("mul", (x, 2))
    graph.output((graph.call_function(torch.add, (doubled, weight)),))
    return module_of(Program(graph, ("input:x", "param:weight")), None)


def exported(module: ProgramModule) -> Callable[..., Any]:
    return torch.export.export(module, INPUTS, strict=False).module()


def traced(module: ProgramModule) -> Callable[..., Any]:
    return make_fx(module)(*INPUTS)


def copied(module: ProgramModule) -> Callable[..., Any]:
    found = copy.deepcopy(module)
    assert isinstance(found, ProgramModule)
    assert found.graph is not module.graph
    return found


def interpreted(module: ProgramModule) -> Callable[..., Any]:
    return fx.Interpreter(module).run


def generated(module: ProgramModule) -> Callable[..., Any]:
    return fx.GraphModule(module, module.graph)


def as_it_is(module: ProgramModule) -> Callable[..., Any]:
    return module


@pytest.mark.parametrize("use", [as_it_is, copied, interpreted, generated, exported, traced])
def test_a_compiler_can_use_it_as_any_graph_module(
    use: Callable[[ProgramModule], Callable[..., Any]], module: ProgramModule
) -> None:
    (result,) = use(module)(*INPUTS)
    assert torch.equal(result, WANTED)


def test_a_change_of_its_graph_is_followed(module: ProgramModule) -> None:
    other = copy.deepcopy(module)
    for node in module.graph.nodes:
        if node.target is torch.add:
            node.target = torch.sub
    module.recompile()
    assert torch.equal(module(*INPUTS)[0], torch.tensor([-8.0, -16.0]))
    assert torch.equal(other(*INPUTS)[0], WANTED), "a copy has calls of its own"


def test_its_text_can_be_read_and_is_not_executed(module: ProgramModule) -> None:
    seen: list[str] = []
    listening = True

    def hear(event: str, _: object) -> None:
        if listening and event in ("compile", "exec"):
            seen.append(event)

    sys.addaudithook(hear)
    module.recompile()
    result: tuple[Tensor, ...] = module(*INPUTS)
    listening = False
    assert torch.equal(result[0], WANTED)
    assert "torch.add" in module.code
    assert seen == []
