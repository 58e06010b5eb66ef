"""The experts that a rank holds of one layer, and what can be computed with them.

A path needs nothing else of them: experts in another format are one more class here.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rbln_backend.devices.emulated.kernel_set import packs_weights
from rbln_backend.devices.emulated.packing import packed_shape

# SwiGLU as gpt-oss has it.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


class ExpertAdapters(Protocol):
    """LoRA adapters of the experts of one layer in the graph that is being captured."""

    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of the ops for experts."""
        ...

    def add_first(self, gate_up: Tensor, x: Tensor, number: int) -> None:
        """Add to what the first projection of expert ``number`` makes of x [T, H]."""
        ...

    def add_second(self, out: Tensor, inner: Tensor, number: int) -> None:
        """Add to what the second one makes of ``inner`` [T, I]."""
        ...


class Experts(Protocol):
    """E experts of one layer; x is [T, H] and so is every result."""

    count: int
    adapters: ExpertAdapters | None
    """None in an engine whose adapters leave experts alone."""

    def chosen(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Sum over k of weights[t, k] * expert(ids[t, k]); see the op ``moe``."""
        ...

    def weighted(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Sum over e of weights[t, e] * expert(e); see the op ``moe_masked``."""
        ...

    def expert(self, x: Tensor, number: int) -> Tensor:
        """Return one expert's output [T, H] for every row of x [T, H]."""
        ...


class GluExperts(Protocol):
    """Experts that an NPU keeps for one op of the SDK, which computes all of them."""

    count: int
    adapters: ExpertAdapters | None

    def glu(self, x: Tensor, by_expert: Tensor, expert_map: Tensor | None) -> Tensor:
        """x [T, H], weights [E of all ranks, T], map int32 [E of all ranks]; returns [T, H]."""
        ...


class WeightStack(NamedTuple):
    """One matrix of every expert: weight [E, width, inputs] or packed, bias [E, width]."""

    weight: Tensor
    bias: Tensor | None
    width: int

    def row(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return one expert's weight [width, inputs] or packed, and bias [width]."""
        return self.weight[number], None if self.bias is None else self.bias[number]


class PlainExperts:
    """Matrices as the checkpoint has them: w13 [E, 2 * I, H], w2 [E, H, I]."""

    adapters: ExpertAdapters | None = None

    def __init__(self, layer: Any) -> None:
        self.w13, self.w13_bias = layer.w13_weight, getattr(layer, "w13_bias", None)
        self.w2, self.w2_bias = layer.w2_weight, getattr(layer, "w2_bias", None)
        self.count: int = self.w13.shape[0]
        self.hidden_size: int = layer.hidden_size
        self.intermediate_size: int = layer.intermediate_size_per_partition
        self.activation: str = layer.activation.value

    def chosen(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        mixed: Tensor = torch.ops.rbln_emulator.moe(x, weights, ids, *self._arguments())
        return mixed

    def weighted(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        mixed: Tensor = torch.ops.rbln_emulator.moe_masked(x, weights, counts, *self._arguments())
        return mixed

    def expert(self, x: Tensor, number: int) -> Tensor:
        up = WeightStack(self.w13, self.w13_bias, 2 * self.intermediate_size)
        down = WeightStack(self.w2, self.w2_bias, self.hidden_size)
        gate_up = self._linear(x, up, number)
        if self.adapters is not None:
            self.adapters.add_first(gate_up, x, number)
        inner = self._silu(gate_up) if self.activation == "silu" else swiglu_oai(gate_up)
        out = self._linear(inner, down, number)
        if self.adapters is not None:
            self.adapters.add_second(out, inner, number)
        return out

    def glu(self, x: Tensor, by_expert: Tensor, expert_map: Tensor | None) -> Tensor:
        inner = self.intermediate_size
        mixed: Tensor = torch.ops.rbln_custom_ops.custom_moe_glu(
            x,
            self.w13[:, :inner],
            self.w13[:, inner:],
            self.w2,
            by_expert,
            self.activation,
            expert_map,
            *self._split_biases(),
        )
        return mixed

    def _split_biases(self) -> tuple[Tensor | None, ...]:
        if self.w13_bias is None:
            return None, None, self.w2_bias
        inner = self.intermediate_size
        return self.w13_bias[:, :inner], self.w13_bias[:, inner:], self.w2_bias

    def _arguments(self) -> tuple[Any, ...]:
        return (
            self.w13,
            self.w13_bias,
            self.w2,
            self.w2_bias,
            self.intermediate_size,
            self.activation,
            *(() if self.adapters is None else self.adapters.arguments()),
        )

    def _linear(self, x: Tensor, stack: WeightStack, number: int) -> Tensor:
        return functional.linear(x, *stack.row(number))

    def _silu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class PackedExperts(PlainExperts):
    """Matrices in the layout of the emulator's kernels, which make one layer's at a time."""

    def __init__(self, layer: Any) -> None:
        for name in ("w13_weight", "w2_weight"):
            packed = _pack(getattr(layer, name).data)
            layer.register_parameter(name, torch.nn.Parameter(packed, requires_grad=False))
        super().__init__(layer)

    def _linear(self, x: Tensor, stack: WeightStack, number: int) -> Tensor:
        product: Tensor = torch.ops.rbln_emulator.linear(x, *stack.row(number), stack.width)
        return product

    def _silu(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = torch.ops.rbln_emulator.activate(gate_up, "silu", True)
        return gated


def hold_experts(layer: Any, *, packs: bool) -> PlainExperts:
    """Hold the experts of ``layer`` as the device wants them; the layer keeps that form."""
    return PackedExperts(layer) if packs and packs_weights() else PlainExperts(layer)


def swiglu_oai(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I], alternating, to [T, I]."""
    pairs = gate_up.float()
    gate = pairs[..., ::2].clamp(max=SWIGLU_LIMIT)
    up = pairs[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)).to(gate_up.dtype)


def _pack(matrices: Tensor) -> Tensor:
    """Plain [E, N, K] to E packed matrices."""
    packed = matrices.new_empty(
        (matrices.shape[0], *packed_shape(matrices.dtype, *matrices.shape[1:]))
    )
    for target, matrix in zip(packed, matrices, strict=True):
        target.copy_(torch.ops.rbln_emulator.pack_linear_weight(matrix))
    return packed
