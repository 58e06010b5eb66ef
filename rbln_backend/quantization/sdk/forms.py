"""Quantised weights as an NPU's graph holds them: plain operators that the SDK's compiler matches.

The SDK has no op for a quantised linear layer. The vendor's vllm-rbln 0.12 writes these operators
before ``linear``, and its compiler is said to keep the weights as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The columns of an integer weight that the SDK finds a scale for; larger groups repeat theirs.
SDK_GROUP = 64
_E4M3 = torch.finfo(torch.float8_e4m3fn)
_SMALLEST = 1e-10


def dequantized_integers(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [N, K] times scales [N, K / 64, 1] or [N, 1], in ``dtype``."""
    weight = values.to(dtype)
    if scales.dim() == 2:
        return weight * scales
    return (weight.view(weight.shape[0], -1, SDK_GROUP) * scales).view(weight.shape)


def dequantized_parts(
    values: Tensor, scales: Tensor, columns: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """e4m3 [N, K] times scales [parts], one for each of the parts of ``columns``, or [] for all.

    As vllm-rbln 0.12 writes ModelOpt's weights.
    """
    weight = values.to(dtype)
    if scales.dim() == 0:
        return weight * scales.to(dtype)
    parts = zip(weight.split(list(columns), dim=0), scales.to(dtype), strict=True)
    return torch.cat([part * scale for part, scale in parts], dim=0)


def dequantized_blocks(
    values: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """e4m3 [N, K] times scales [ceil(N / rows), K / inputs], one per ``block`` (rows, inputs)."""
    rows, inputs = block
    columns, depth = values.shape
    by_row = scales.repeat_interleave(rows, dim=0)[:columns, :]
    weight = values.view(columns, depth // inputs, inputs).to(dtype)
    return (weight * by_row[:, :, None].to(dtype)).view(columns, depth)


def scaled_in_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """x [T, K] as float32 in the range of e4m3, not rounded, and float32 scales [T, K / group]."""
    parts = x.unflatten(-1, (-1, group)).float()
    scales = parts.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST) / _E4M3.max
    values = (parts / scales).clamp(_E4M3.min, _E4M3.max)
    return values.flatten(-2), scales.squeeze(-1)


def by_groups_of_bytes(x: Tensor, group: int) -> Tensor:
    """x [T, K] as it is after ``scaled_in_groups``, in its dtype: the W8A8 form of an input.

    vllm-rbln 0.12 does not round to e4m3 in the graph either.
    """
    values, scales = scaled_in_groups(x, group)
    return values.to(x.dtype) * scales.repeat_interleave(group, dim=-1).to(x.dtype)
