"""Experts of e4m3 in blocks, as an NPU keeps them: the SDK's op reads weights and scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rbln_backend.moe.experts import PlainExperts, WeightStack
from rbln_backend.quantization.sdk.forms import dequantized_blocks

BLOCKS_OP = "custom_moe_glu_group_dequantize"


class BlockExperts(PlainExperts):
    """w13 [E, 2 * I, H] and w2 [E, H, I] of e4m3, float32 scales [E, rows, inputs] by block."""

    def __init__(self, layer: Any, block: tuple[int, int]) -> None:
        """``block``: rows and inputs that share a scale; both divide a rank's sizes."""
        super().__init__(layer)
        self._block = block
        self._w13_scale, self._w2_scale = layer.w13_weight_scale, layer.w2_weight_scale

    def glu(self, x: Tensor, by_expert: Tensor, expert_map: Tensor | None) -> Tensor:
        """As ``PlainExperts``: x [T, H] to [T, H]."""
        inner = self.intermediate_size
        rows = inner // self._block[0]
        mixed: Tensor = torch.ops.rbln_custom_ops.custom_moe_glu_group_dequantize(
            *(x, self.w13[:, :inner], self._w13_scale[:, :rows]),
            *(self.w13[:, inner:], self._w13_scale[:, rows:]),
            *(self.w2, self._w2_scale, by_expert),
            *(torch.tensor(self._block[1], dtype=torch.int32), self.activation),
            *(*self._split_biases(), expert_map),
        )
        return mixed

    def _linear(self, x: Tensor, stack: WeightStack, number: int) -> Tensor:
        weight, bias = stack.row(number)
        scales = self._w13_scale if stack.weight is self.w13 else self._w2_scale
        plain = dequantized_blocks(weight, scales[number], self._block, x.dtype)
        return functional.linear(x, plain, bias)
