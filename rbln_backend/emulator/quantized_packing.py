"""The kernels' layout of weights of 4 and 8 bits: packing checkpoints' words, and the values.

A weight [N, K] of ``bits`` is words int32 [ceil(N/16), K * bits / 32, 16] and scales
[ceil(N/16), groups, 16], in panels of 16 output columns as ``packing`` has them. A word holds
32 / bits neighbours along K, the first in its lowest bits, each as value + 2**(bits - 1): what
compressed-tensors and GPTQ pack along K too, so that packing moves words and changes none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rbln_backend.emulator.packing import PANEL, pack_consuming

CHUNK = 64
"""Depths that the kernels multiply before they look at a scale."""


def pack_words(words: Tensor) -> Tensor:
    """Words int32 [N, K * bits / 32] as panels; in their own memory where they fit it.

    ``words`` must not be read again.
    """
    # The packer moves words of 32 bits, whatever they mean.
    return pack_consuming(words.view(torch.float32)).view(torch.int32)


def pack_transposed_words(words: Tensor) -> Tensor:
    """Words int32 [K * bits / 32, N] as panels; a copy."""
    depth, columns = words.shape
    padded = torch.nn.functional.pad(words, (0, -columns % PANEL))
    return padded.view(depth, -1, PANEL).transpose(0, 1).contiguous()


def pack_scales(scales: Tensor) -> Tensor:
    """Scales [N, groups] as panels; a copy."""
    return pack_transposed_words(scales.t().contiguous())


def unpack_fields(words: Tensor, bits: int) -> Tensor:
    """Words int32 [..., W] to the values int8 [..., W * 32 / bits] that they hold."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (fields - (1 << (bits - 1))).to(torch.int8).flatten(-2)


def dequantize(words: Tensor, scales: Tensor, out_features: int, bits: int) -> Tensor:
    """The float32 weight [out_features, K] behind packed ``words`` and ``scales``."""
    panels, groups = scales.shape[:2]
    values = unpack_fields(words.transpose(1, 2).contiguous(), bits)
    by_group = values.view(panels, PANEL, groups, -1).float()
    scaled = by_group * scales.float().transpose(1, 2).unsqueeze(-1)
    return scaled.view(panels * PANEL, -1)[:out_features]
