"""Rewrites for the emulated device keep what a graph computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from rbln_backend.devices.emulated.kernel_set import load_kernels
from rbln_backend.devices.emulated.lowering import lower_graph
from rbln_backend.devices.emulated.packing import pack, pack_consuming, pack_reference
from rbln_backend.errors import CompileError
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable
from tests.kernel_cache import share_kernels


@pytest.fixture
def native_kernels(tmp_path: Path) -> None:
    load_kernels(share_kernels(tmp_path), "native")


class Layer(nn.Module):
    """A linear, a cast to the dtype it has, and an output buffer filled by one copy."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.projection(x).to(torch.float32)
        buffer = torch.empty(x.shape[0], 6)
        buffer.view(-1, 2, 3).copy_(hidden.view(-1, 2, 3) * 2)
        return buffer.view(-1, 6) + 1


def captured() -> tuple[Layer, TensorTable, Tensor, Program]:
    layer, x = Layer(), torch.randn(3, 4)
    table = TensorTable(lambda weight: weight.clone())
    table.add_model(layer)
    return layer, table, x, capture(layer, (x,), table, {"x": x})


def targets(program: Program) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op.startswith("call")]


def test_capture_binds_weights_by_path_and_inputs_by_name() -> None:
    _, _, _, program = captured()
    assert sorted(program.bindings) == [
        "input:x",
        "param:projection.bias",
        "param:projection.weight",
    ]


def test_buffers_and_casts_disappear_and_the_result_stays() -> None:
    layer, table, x, program = captured()
    lowered = lower_graph(program, pack_linear=False)
    assert not {"copy_", "to"} & set(targets(lowered))
    tensors = table.resolve_all(lowered.bindings, {"x": x})
    with torch.inference_mode():
        actual = fx.GraphModule({}, lowered.graph)(*tensors)
        expected = layer(x)
    torch.testing.assert_close(actual[0], expected)


def test_the_captured_program_is_left_alone() -> None:
    _, _, _, program = captured()
    before = program.to_bytes()
    lower_graph(program, pack_linear=False)
    assert program.to_bytes() == before
    assert "copy_" in targets(program)


def test_a_write_is_never_dead_code() -> None:
    x, log = torch.randn(3), torch.zeros(3)
    table = TensorTable(lambda weight: weight)
    table.add("param:log", log)

    def step(x: Tensor) -> Tensor:
        log.copy_(x * 2)
        return x + 1

    lowered = lower_graph(capture(step, (x,), table, {"x": x}), pack_linear=True)
    fx.GraphModule({}, lowered.graph)(*table.resolve_all(lowered.bindings, {"x": x}))
    torch.testing.assert_close(log, x * 2)


def test_a_tensor_without_a_name_is_refused() -> None:
    unknown, x = torch.ones(7), torch.randn(7)
    with pytest.raises(CompileError, match=r"shape \(7,\) that is neither a weight"):
        capture(lambda x: x + unknown, (x,), TensorTable(lambda w: w), {"x": x})


def test_a_graph_break_is_refused() -> None:
    def breaks(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1

    x = torch.randn(3)
    with pytest.raises(CompileError, match="one static graph"):
        capture(breaks, (x,), TensorTable(lambda w: w), {"x": x})


def test_only_weights_the_kernels_can_multiply_by_are_packed() -> None:
    layer, x = nn.Linear(4, 6, bias=False).to(torch.float64), torch.randn(3, 4).double()
    table = TensorTable(lambda weight: weight)
    table.add_model(layer)
    lowered = lower_graph(capture(layer, (x,), table, {"x": x}), pack_linear=True)
    assert sorted(lowered.bindings) == ["input:x", "param:weight"]


def test_packed_linears_compute_the_same(native_kernels: None) -> None:
    layer, table, x, program = captured()
    table = TensorTable(pack, pack_consuming)
    table.add_model(layer)
    lowered = lower_graph(program, pack_linear=True)
    assert "packed:projection.weight" in lowered.bindings
    assert "param:projection.weight" not in lowered.bindings
    with torch.inference_mode():
        expected = layer(x)
    table.pack_weights(lowered.bindings)
    tensors = table.resolve_all(lowered.bindings, {"x": x})
    with torch.inference_mode():
        actual = fx.GraphModule({}, lowered.graph)(*tensors)
    torch.testing.assert_close(actual[0], expected)
    # The plain copy goes once nothing reads it; its shape stays for a later capture.
    assert layer.projection.weight.shape == (6, 4)
    assert layer.projection.weight.untyped_storage().nbytes() == 4
    with pytest.raises(CompileError, match="only the packed form was kept"):
        table.resolve("param:projection.weight", {})


def test_a_weight_with_one_reader_is_packed_where_it_lies(native_kernels: None) -> None:
    layer = nn.Linear(8, 32, bias=False)
    table = TensorTable(pack, pack_consuming)
    table.add_model(layer)
    plain, address = layer.weight.detach().clone(), layer.weight.data_ptr()
    table.pack_weights(["packed:weight", "input:x"])
    packed = table.resolve("packed:weight", {})
    assert packed.data_ptr() == address
    assert torch.equal(packed, pack_reference(plain))


@pytest.mark.parametrize("shared", ["read by a program", "a view of another parameter"])
def test_a_weight_with_two_readers_is_copied(shared: str, native_kernels: None) -> None:
    model = nn.Module()
    model.head = nn.Linear(8, 32, bias=False)
    programs = ["packed:head.weight"]
    if shared == "read by a program":
        programs.append("param:head.weight")
    else:
        model.embedding = nn.Parameter(model.head.weight.data.view(16, 16))
    table = TensorTable(pack, pack_consuming)
    table.add_model(model)
    plain = model.head.weight.detach().clone()
    table.pack_weights(programs)
    assert torch.equal(table.resolve("packed:head.weight", {}), pack_reference(plain))
    assert torch.equal(table.resolve("param:head.weight", {}), plain)


class Gates(nn.Module):
    """As routers and shared experts write them; the last three have no kernel."""

    def forward(self, x: Tensor) -> Tensor:
        known = torch.sigmoid(x) + x.sigmoid() + functional.silu(x) + functional.softplus(x)
        return known + functional.softplus(x, 2.0) + torch.tanh(x) + torch.sigmoid(x.int()).float()


def test_gates_have_the_same_bits_in_every_batch(native_kernels: None) -> None:
    """ATen's differ between the body of its vector loop and what is left at the end."""
    x = torch.randn(64, 7)
    program = capture(Gates(), (x,), TensorTable(lambda weight: weight), {"x": x})
    lowered = lower_graph(program, pack_linear=True)
    assert targets(lowered).count("rbln_emulator.activate.default") == 4
    expected, at_once = Gates()(x), fx.GraphModule({}, lowered.graph)(x)[0]
    torch.testing.assert_close(at_once, expected)
    kernels = [n.args[1] for n in lowered.graph.nodes if "activate" in str(n.target)]
    for function in kernels:
        at_once = torch.ops.rbln_emulator.activate(x, function, False)
        for rows in (1, 2, 3, 16):
            alone = torch.ops.rbln_emulator.activate(x[:rows], function, False)
            assert torch.equal(alone, at_once[:rows])
