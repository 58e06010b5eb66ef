"""The kernels' weight layout, stated in PyTorch: which weights have one, packing and its inverse.

A [N, K] weight becomes panels of 16 output columns, zero-filled at the edges: float32 and float16
as [N/16, K, 16], bfloat16 as [N/16, K/2, 16, 2], whose neighbours along K share a 32-bit word.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PANEL = 16
PACKABLE_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))


def can_pack(weight: Tensor) -> bool:
    """Return True if ``weight`` is a [N, K] matrix that ``rbln_emulator::linear`` supports."""
    return weight.dim() == 2 and weight.dtype in PACKABLE_DTYPES and weight.numel() > 0


def packed_shape(dtype: torch.dtype, out_features: int, in_features: int) -> tuple[int, ...]:
    """The shape of a packed [out_features, in_features] weight."""
    panels = -(-out_features // PANEL)
    if dtype == torch.bfloat16:
        return panels, -(-in_features // 2), PANEL, 2
    return panels, in_features, PANEL


def fits_in_place(weight: Tensor) -> bool:
    """Return True if the packed layout of ``weight`` [N, K] fits its own memory."""
    packed = packed_shape(weight.dtype, *weight.shape)
    return weight.is_contiguous() and math.prod(packed) == weight.numel()


def pack(weight: Tensor) -> Tensor:
    """``weight`` [N, K] in the packed layout, by the active kernels; a copy."""
    packed: Tensor = torch.ops.rbln_emulator.pack_linear_weight(weight)
    return packed


def pack_consuming(weight: Tensor) -> Tensor:
    """As ``pack``, weight [N, K], reusing its memory if it fits: do not read ``weight`` again."""
    if not fits_in_place(weight):
        return pack(weight)
    torch.ops.rbln_emulator.pack_linear_weight_(weight)
    return weight.view(packed_shape(weight.dtype, *weight.shape))


def pack_reference(weight: Tensor) -> Tensor:
    """``weight`` [N, K] in the packed layout."""
    shape = packed_shape(weight.dtype, *weight.shape)
    pair = shape[3] if len(shape) == 4 else 1
    padded = weight.new_zeros(shape[0] * PANEL, shape[1] * pair)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    split = padded.view(shape[0], PANEL, shape[1], pair)
    return split.permute(0, 2, 1, 3).reshape(shape).contiguous()


def unpack(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The [out_features, in_features] weight behind ``packed``."""
    panels, steps = packed.shape[:2]
    split = packed.view(panels, steps, PANEL, -1).permute(0, 2, 1, 3)
    return split.reshape(panels * PANEL, -1)[:out_features, :in_features].contiguous()
