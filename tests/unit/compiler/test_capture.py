"""Captured models as programs that can be stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from rbln_backend.errors import CompileError
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable


def captured(function: Callable[[Tensor], Tensor], model: nn.Module | None = None) -> Program:
    table = TensorTable(lambda weight: weight)
    if model is not None:
        table.add_model(model)
    x = torch.randn(3, 4)
    return capture(function, (x,), table, {"x": x})


def test_capturing_computes_nothing() -> None:
    x, written = torch.randn(3, 4), torch.zeros(3, 4)
    table = TensorTable(lambda weight: weight)
    capture(lambda x, written: written.copy_(x), (x, written), table, {"x": x, "written": written})
    assert not written.any()


def operators(program: Program) -> list[str]:
    calls = [node for node in program.graph.nodes if node.op.startswith("call")]
    return [getattr(node.target, "__name__", str(node.target)) for node in calls]


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.cos()


def without_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x.cos()


def with_idle_dropout(x: Tensor) -> Tensor:
    return functional.dropout(functional.dropout(x.cos(), 0.5, False), p=0.0)


def with_a_module_made_inside(x: Tensor) -> Tensor:
    return nn.Identity()(x).cos()


@pytest.mark.parametrize(
    "function",
    [without_gradients, without_autocast, with_idle_dropout, with_a_module_made_inside],
)
def test_what_computes_nothing_is_left_out(function: Callable[[Tensor], Tensor]) -> None:
    program = captured(function)
    assert operators(program) == ["cos"]
    assert operators(Program.from_bytes(program.to_bytes())) == ["cos"]


NUMBER = torch.tensor(1.5, dtype=torch.float64)


def test_a_number_that_code_keeps_as_a_tensor_is_written_into_the_program() -> None:
    program = captured(lambda x: x.cos() * (NUMBER / torch.tensor(2.0)))
    assert program.bindings == ("input:x",)
    again = Program.from_bytes(program.to_bytes())
    x = torch.randn(3, 4)
    (result,) = fx.Interpreter(fx.GraphModule({}, again.graph)).run(x)
    assert torch.equal(result, x.cos() * 0.75)
    assert result.dtype == torch.float32


def test_a_transpose_is_a_method_that_can_be_stored() -> None:
    program = Program.from_bytes(captured(lambda x: x.T.cos()).to_bytes())
    x = torch.randn(3, 4)
    (result,) = fx.Interpreter(fx.GraphModule({}, program.graph)).run(x)
    assert torch.equal(result, x.t().cos())


def with_dropout(x: Tensor) -> Tensor:
    return functional.dropout(x.cos(), p=0.5)


def with_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x.cos()


@pytest.mark.parametrize("function", [with_dropout, with_autocast])
def test_what_would_change_the_result_is_kept_and_cannot_be_stored(
    function: Callable[[Tensor], Tensor],
) -> None:
    program = captured(function)
    assert len(operators(program)) > 1
    with pytest.raises(CompileError, match="cannot be stored"):
        program.to_bytes()


def test_weights_and_buffers_are_bound_by_name() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("factor", torch.tensor(0.5))
    program = captured(lambda x: functional.pad(model(x) * model.factor, (0, 1)), model)
    assert sorted(program.bindings) == ["input:x", "param:bias", "param:factor", "param:weight"]
    assert Program.from_bytes(program.to_bytes()).bindings == program.bindings


def test_a_tensor_without_a_name_is_refused() -> None:
    unknown = torch.randn(4)
    with pytest.raises(CompileError, match=r"shape \(4,\)"):
        captured(lambda x: x + unknown)
