"""Programs as data: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
from torch import fx

from rbln_backend.compiler.program import Program
from rbln_backend.errors import CompileError, CorruptArtifactError


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
    result: tuple[torch.Tensor, ...] = fx.GraphModule({}, program.graph)(*args)
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


def edited(change: dict[str, Any]) -> bytes:
    document = json.loads(sample().to_bytes())
    document["nodes"][2] |= change
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "name",
    [
        "torch.load",
        "builtins.eval",
        "operator.attrgetter",
        "method.apply_",
        "method.numpy",
        "op.aten::from_file.default",
        "op.rbln_emulated_ops::missing.default",
        "functional.__class__",
    ],
)
def test_an_operator_off_the_list_cannot_be_loaded(name: str) -> None:
    with pytest.raises(CorruptArtifactError, match="cannot be read"):
        Program.from_bytes(edited({"op": name}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b'{"format": 99, "bindings": [], "nodes": []}',
        edited({"args": {"node": 99}}),
        edited({"args": {"dtype": "nn"}}),
        edited({"args": {"unknown": 1}}),
        edited({"op": "placeholder"}),
    ],
)
def test_malformed_programs_are_corrupt_not_crashes(data: bytes) -> None:
    with pytest.raises(CorruptArtifactError):
        Program.from_bytes(data)
