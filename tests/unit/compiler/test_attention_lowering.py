"""An attention layer as vLLM's models write it becomes one call, and computes the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from rbln_backend.devices.emulated.kernel_set import load_kernels
from rbln_backend.devices.emulated.lowering import lower_graph
from rbln_backend.graphs.capture import capture
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable
from rbln_backend.layers.attention_ops import AttentionOptions, EmulatedAttention
from tests.kernel_cache import share_kernels

KV_HEADS, GROUP, HEAD_SIZE, WIDTH = 2, 2, 32, 48
Q, KV = KV_HEADS * GROUP * HEAD_SIZE, KV_HEADS * HEAD_SIZE


@pytest.fixture(autouse=True)
def native_kernels(tmp_path: Path) -> Iterator[None]:
    load_kernels(share_kernels(tmp_path), "native")
    yield


class Layer(nn.Module):
    """Merged projection, norms of the heads, rotation, attention into a buffer, output."""

    def __init__(self, *, norms: bool, rotates: bool, window: bool, custom: bool = False) -> None:
        super().__init__()
        self.norms, self.rotates, self.window = norms, rotates, window
        self.qkv = nn.Linear(WIDTH, Q + 2 * KV, bias=False)
        self.out = nn.Linear(Q, WIDTH, bias=False)
        self.q_norm, self.k_norm = (nn.Parameter(torch.randn(HEAD_SIZE)) for _ in "qk")
        self.register_buffer("rotary", torch.randn(20, HEAD_SIZE))
        self.register_buffer("scale", torch.tensor(HEAD_SIZE**-0.5))
        shape = (4, 2, KV_HEADS, 1, 16, HEAD_SIZE)
        self.register_buffer("cache", torch.randn(shape).transpose(0, int(custom)).contiguous())
        self.attention = EmulatedAttention(AttentionOptions(), use_custom_kernel=custom)

    def forward(self, x: Tensor, positions: Tensor, starts: Tensor, tables: Tensor) -> Tensor:
        ops, batch = torch.ops.rbln_emulator, starts.shape[0]
        q, k, v = self.qkv(x).split([Q, KV, KV], dim=-1)
        if self.norms:
            q = ops.rms_norm(q.view(*q.shape[:-1], -1, HEAD_SIZE), self.q_norm, 1e-6).view(q.shape)
            k = ops.rms_norm(k.view(*k.shape[:-1], -1, HEAD_SIZE), self.k_norm, 1e-6).view(k.shape)
        if self.rotates:
            q, k = ops.rotary_embedding(positions, q, k, self.rotary, HEAD_SIZE, True)
        output = torch.empty(x.shape[0], Q, dtype=x.dtype)
        output = output.view(-1, KV_HEADS * GROUP, HEAD_SIZE)
        heads = [t.view(-1, t.shape[-1] // HEAD_SIZE, HEAD_SIZE) for t in (q, k, v)]
        q, k, v = (
            t.view(batch, -1, KV_HEADS, t.shape[1] // KV_HEADS, HEAD_SIZE).permute(0, 2, 3, 1, 4)
            for t in heads
        )
        common = {"q": q, "k": k, "v": v, "kv_cache": self.cache, "scale": self.scale}
        common |= {"block_tables": tables, "is_prefill": False}
        if self.window:
            result = self.attention.shifted_window(
                cache_seq_len=starts, cache_offset=starts + 1, **common
            )
        else:
            result = self.attention.causal(seq_idx=starts, one_block=False, **common)
        output.copy_(result.permute(0, 3, 1, 2, 4).reshape(output.shape))
        projected: Tensor = self.out(output.view(-1, Q))
        return projected


def inputs() -> dict[str, Tensor]:
    return {
        "x": torch.randn(3, WIDTH),
        "positions": torch.tensor([5, 0, 7]),
        "starts": torch.tensor([[5], [0], [7]], dtype=torch.int32),
        "tables": torch.tensor([[1], [2], [3]], dtype=torch.int32),
    }


def run(program: Program, layer: Layer, step: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The result over a cache of its own, and that cache afterwards."""
    table = TensorTable(torch.ops.rbln_emulator.pack_linear_weight)
    table.add_model(layer)
    cache = layer.cache.clone()
    table.add("param:cache", cache)
    with torch.inference_mode():
        return fx.GraphModule({}, program.graph)(*table.resolve_all(program.bindings, step))[
            0
        ], cache


def lowered_pair(layer: Layer, step: dict[str, Tensor]) -> tuple[Program, Program]:
    """The program with packed linears, and the same with nothing else done to it."""
    table = TensorTable(torch.ops.rbln_emulator.pack_linear_weight)
    table.add_model(layer)
    program = capture(layer, tuple(step.values()), table, step)
    return program, lower_graph(program, pack_linear=True)


def targets(program: Program) -> list[str]:
    calls = [node for node in program.graph.nodes if node.op.startswith("call")]
    return [str(getattr(node.target, "__name__", node.target)) for node in calls]


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_a_layer_becomes_one_call(window: bool, norms: bool, rotates: bool) -> None:
    layer, step = Layer(norms=norms, rotates=rotates, window=window), inputs()
    captured, lowered = lowered_pair(layer, step)
    left = [name for name in targets(lowered) if name != "add"]
    assert left == ["linear.default", "self_attention.default", "linear.default"]
    expected, expected_cache = run(captured, layer, step)
    actual, cache = run(lowered, layer, step)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(cache, expected_cache)
    stored = Program.from_bytes(lowered.to_bytes())
    again, _ = run(stored, layer, step)
    assert torch.equal(again, actual)


def test_caches_of_another_layout_keep_their_op() -> None:
    layer, step = Layer(norms=False, rotates=True, window=False, custom=True), inputs()
    captured, lowered = lowered_pair(layer, step)
    assert "self_attention.default" not in targets(lowered)
    torch.testing.assert_close(run(lowered, layer, step)[0], run(captured, layer, step)[0])


class RotatedFirst(Layer):
    """The norm of the heads comes after their rotation."""

    def forward(self, x: Tensor, positions: Tensor, starts: Tensor, tables: Tensor) -> Tensor:
        ops = torch.ops.rbln_emulator
        q, k, v = self.qkv(x).split([Q, KV, KV], dim=-1)
        q, k = ops.rotary_embedding(positions, q, k, self.rotary, HEAD_SIZE, True)
        q = ops.rms_norm(q.view(3, -1, HEAD_SIZE), self.q_norm, 1e-6)
        k = ops.rms_norm(k.view(3, -1, HEAD_SIZE), self.k_norm, 1e-5)
        q, k, v = (t.view(3, 1, KV_HEADS, -1, HEAD_SIZE).permute(0, 2, 3, 1, 4) for t in (q, k, v))
        common = {"kv_cache": self.cache, "scale": self.scale, "block_tables": tables}
        result = self.attention.causal(
            q=q, k=k, v=v, seq_idx=starts, is_prefill=False, one_block=False, **common
        )
        projected: Tensor = self.out(result.permute(0, 3, 1, 2, 4).reshape(3, Q))
        return projected


def test_what_is_done_in_another_order_stays_in_it() -> None:
    layer, step = RotatedFirst(norms=True, rotates=True, window=False), inputs()
    captured, lowered = lowered_pair(layer, step)
    assert {"rms_norm", "rotary_embedding"} <= set(targets(lowered))
    torch.testing.assert_close(run(lowered, layer, step)[0], run(captured, layer, step)[0])
