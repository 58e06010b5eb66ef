"""Rounding to e4m3 (fp8 of the kind "fn"), by its definition: no engine's code, no torch's."""

from __future__ import annotations

import torch
from torch import Tensor

_DENORMALS = [m * 2.0**-9 for m in range(8)]
_NORMALS = [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
# In the order of their bits; the last pattern is NaN.
SIZES = torch.tensor(_DENORMALS + _NORMALS[:-1], dtype=torch.float64)


def rounded_to_e4m3(x: Tensor) -> Tensor:
    """The nearest number of e4m3, ties to an even last bit; beyond 448 it is 448. Float64."""
    sizes = x.double().abs().clamp(max=448.0).contiguous()
    above = torch.searchsorted(SIZES, sizes).clamp(max=len(SIZES) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = SIZES[above] - sizes, sizes - SIZES[below]
    is_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    return torch.where(is_below, SIZES[below], SIZES[above]).copysign(x.double())


def kept_as_e4m3(x: Tensor, scale: float = 1.0) -> Tensor:
    """What a cache of e4m3 with a scale gives back of ``x``; float64."""
    return rounded_to_e4m3(x.float() / scale) * scale
