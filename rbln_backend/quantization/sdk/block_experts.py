"""Experts of e4m3 in blocks, as an NPU keeps them: the SDK's op reads weights and scales.

With ``use_w8a8`` another op takes the tokens as e4m3 in groups, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rbln_backend.moe.experts import PlainExperts, WeightStack
from rbln_backend.quantization.sdk.forms import dequantized_blocks, scaled_in_groups

BLOCKS_OP, BYTES_OP = "custom_moe_glu_group_dequantize", "custom_moe_glu_w8a8"


class BlockExperts(PlainExperts):
    """w13 [E, 2 * I, H] and w2 [E, H, I] of e4m3, float32 scales [E, rows, inputs] by block."""

    def __init__(self, layer: Any, block: tuple[int, int], *, takes_bytes: bool) -> None:
        """``block``: rows and inputs that share a scale; both divide a rank's sizes."""
        super().__init__(layer)
        self._block, self._takes_bytes = block, takes_bytes
        self._w13_scale, self._w2_scale = layer.w13_weight_scale, layer.w2_weight_scale

    def glu(self, x: Tensor, by_expert: Tensor, expert_map: Tensor | None) -> Tensor:
        """As ``PlainExperts``: x [T, H] to [T, H]."""
        inner = self.intermediate_size
        rows, ops = inner // self._block[0], torch.ops.rbln_custom_ops
        weights = (
            *(self.w13[:, :inner], self._w13_scale[:, :rows]),
            *(self.w13[:, inner:], self._w13_scale[:, rows:]),
            *(self.w2, self._w2_scale, by_expert),
            *(torch.tensor(self._block[1], dtype=torch.int32), self.activation),
        )
        rest = (*self._split_biases(), expert_map)
        mixed: Tensor
        if self._takes_bytes:
            values, scales = scaled_in_groups(x, self._block[1])
            rounded = values.to(torch.float8_e4m3fn)
            mixed = ops.custom_moe_glu_w8a8(rounded, scales, *weights, x.dtype, *rest)
        else:
            mixed = ops.custom_moe_glu_group_dequantize(x, *weights, *rest)
        return mixed

    def _linear(self, x: Tensor, stack: WeightStack, number: int) -> Tensor:
        weight, bias = stack.row(number)
        scales = self._w13_scale if stack.weight is self.w13 else self._w2_scale
        plain = dequantized_blocks(weight, scales[number], self._block, x.dtype)
        return functional.linear(x, plain, bias)
