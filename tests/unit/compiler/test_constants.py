"""Constants of weights are computed once, when a program is bound."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from rbln_backend.devices.emulated.lowering import fold_constants
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.tensors import TensorTable


def folded(model: nn.Module, x: Tensor) -> tuple[list[str], Callable[[], Tensor]]:
    """The calls that are left of the captured model, and the model that makes them."""
    table = TensorTable(lambda weight: weight)
    table.add_model(model)
    program = capture(model, (x,), table, {"x": x})
    before = program.to_bytes()
    graph, tensors = fold_constants(program, table.resolve_all(program.bindings, {"x": x}))
    assert program.to_bytes() == before
    calls = [str(getattr(n.target, "__name__", n.target)) for n in graph.nodes if "call" in n.op]
    run = fx.GraphModule({}, graph)
    return calls, lambda: run(*tensors)[0]


class Scaled(nn.Module):
    """A scale stored less one, as Gemma's norms have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight.float() + 1.0)


def test_arithmetic_over_weights_is_done_once() -> None:
    model, x = Scaled(8), torch.randn(3, 8)
    calls, run = folded(model, x)
    assert calls == ["mul"]
    assert torch.equal(run(), model(x))
    x.mul_(2)
    assert torch.equal(run(), model(x))


def test_large_weights_are_left_where_they_are() -> None:
    model, x = Scaled(1 << 18), torch.randn(1, 1 << 18)
    calls, run = folded(model, x)
    assert calls == ["float", "add", "mul"]
    assert torch.equal(run(), model(x))


class Written(Scaled):
    """A copy of a weight that the step writes to."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.float() + 1.0
        scale.view(-1).add_(x[0])
        return scale * 2


def test_what_is_written_in_place_is_computed_at_every_step() -> None:
    model, x = Written(8), torch.randn(3, 8)
    _, run = folded(model, x)
    for _ in range(2):
        assert torch.equal(run(), model(x))
