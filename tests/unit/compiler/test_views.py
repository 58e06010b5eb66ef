"""Functions that have a kernel call it, and views that change nothing go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from rbln_backend.devices.emulated.kernel_set import load_kernels
from rbln_backend.devices.emulated.lowering import lower_graph
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable
from tests.kernel_cache import share_kernels


@pytest.fixture
def native_kernels(tmp_path: Path) -> None:
    load_kernels(share_kernels(tmp_path), "native")


def targets(program: Program) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op.startswith("call")]


class Activated(nn.Module):
    """Functions of PyTorch that have a kernel, and views that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        shaped = self.norm(x).view(2, -1, 6).reshape(-1, 6)[..., :6]
        once = nn.functional.gelu(shaped, approximate="tanh").view(2, 3, 2, 3)
        return nn.functional.gelu(once.view(2, 3, 6).view(2, 18)).permute(1, 0).permute(1, 0)


def test_functions_become_kernels_and_idle_views_go(native_kernels: None) -> None:
    layer, x = Activated(), torch.randn(6, 6)
    table = TensorTable(lambda weight: weight)
    table.add_model(layer)
    program = capture(layer, (x,), table, {"x": x})
    lowered = lower_graph(program, pack_linear=True)
    assert [name.rpartition(".")[0] for name in targets(lowered)] == [
        "rbln_emulator.layer_norm",
        "rbln_emulator.activate",
        "",
        "rbln_emulator.activate",
    ]
    tensors = table.resolve_all(lowered.bindings, {"x": x})
    torch.testing.assert_close(fx.GraphModule({}, lowered.graph)(*tensors)[0], layer(x))


def test_views_of_a_copy_and_reordered_rows_stay() -> None:
    x, order = torch.randn(4, 6), torch.tensor([2, 0, 3, 1])
    table = TensorTable(lambda weight: weight)
    table.add("param:order", order)

    def step(x: Tensor) -> Tensor:
        turned = x.permute(1, 0).reshape(4, 6)
        return turned.view(6, 4).permute(1, 0)[order]

    lowered = lower_graph(capture(step, (x,), table, {"x": x}), pack_linear=False)
    tensors = table.resolve_all(lowered.bindings, {"x": x})
    assert torch.equal(fx.GraphModule({}, lowered.graph)(*tensors)[0], step(x))


def test_a_buffer_read_before_its_copy_stays() -> None:
    x = torch.randn(4, 6)

    def step(x: Tensor) -> Tensor:
        buffer = torch.empty(4, 6)
        buffer.view(-1).fill_(1.0)
        before = buffer.view(6, 4) + 1
        buffer.copy_(x)
        return before + buffer.view(6, 4)

    lowered = lower_graph(capture(step, (x,), TensorTable(lambda w: w), {"x": x}), pack_linear=True)
    assert "copy_" in targets(lowered)
    assert torch.equal(fx.GraphModule({}, lowered.graph)(x)[0], step(x))
