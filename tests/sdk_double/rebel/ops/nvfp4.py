"""NVFP4 of ``custom_moe_glu_group_dequantize``: fields of four bits with two kinds of scales.

Weights uint8 [E, N, K / 2] hold two e2m1 numbers each, the first in the lower half; scales e4m3
[E, N, K / group] belong to groups of 16 or 32 inputs, float32 [E] to a whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rebel.ops.library import describe
from rebel.ops.mxfp4 import e2m1_numbers
from rebel.rules import require
from rebel.settings import SETTINGS
from torch import Tensor

NVFP4 = "float4_e2m1fn"
_GROUPS = (16, 32)


def from_nvfp4(weight: Tensor, scale: Tensor, second: Tensor | None, group: int) -> Tensor:
    """Weight uint8 [E, N, K / 2] in float32 [E, N, K].

    With ``scales`` broken groups have each other's scales, with ``nibbles`` the first number of a
    byte is in its upper half.
    """
    assert second is not None
    factors = scale.float()
    if "scales" in SETTINGS.broken:
        factors = factors.flip(2)
    spread = factors.repeat_interleave(group, 2) * second.float()[:, None, None]
    return e2m1_numbers(weight) * spread


def check_nvfp4(
    weight_dtype: str, pairs: Sequence[tuple[Tensor, Tensor]], seconds: Sequence[Tensor | None]
) -> None:
    require("schema", weight_dtype == NVFP4, f"weight_dtype is {weight_dtype!r}, not {NVFP4!r}")
    require("schema", len(seconds) == len(pairs), f"{len(seconds)} of {len(pairs)} scale_2")
    for (weight, scale), second in zip(pairs, seconds, strict=True):
        bytes_of = weight.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn
        group = 2 * weight.shape[2] // scale.shape[2]
        kept = bytes_of and group in _GROUPS and weight.shape[:2] == scale.shape[:2]
        given = f"{describe(weight)} with scales {describe(scale)}"
        require("schema", kept, f"{given} are not NVFP4 in groups of 16 or 32")
        whole = second is not None and list(second.shape) == [weight.shape[0]]
        whole = whole and second is not None and second.dtype == torch.float32
        require("schema", whole, f"scale_2 is {describe(second)}, not float32[experts]")
