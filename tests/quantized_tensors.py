"""A weight in the formats of quantised checkpoints, and what the stored tensors stand for.

Packed here as the formats' documents say, with no code of the engine's. Scales of integers are
bfloat16 numbers, so that an engine of any dtype multiplies by the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHANNEL = -1
Stored = tuple[Tensor, dict[str, Tensor]]
"""The weight [N, K] as it is meant, float32, and by suffix what stands for it in the file."""

_E4M3_MOST = 448.0
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The outputs in a word of AWQ from its lowest bits on.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def compressed(weight: Tensor, bits: int, group: int, *, symmetric: bool = True) -> Stored:
    """compressed-tensors pack-quantized."""
    fields, scales, zeros = _integers(weight, bits, group, symmetric=symmetric)
    stored = {
        "weight_packed": pack(fields, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = pack(zeros.t(), bits).t().contiguous()
    return _meant(fields, scales, zeros), stored


def gptq(weight: Tensor, bits: int, group: int) -> Stored:
    """GPTQ, the first version, which stores zero points less one."""
    fields, scales, zeros = _integers(weight, bits, group)
    groups, depth = scales.shape[1], weight.shape[1]
    stored = {
        "qweight": pack(fields, bits).t().contiguous(),
        "scales": scales.t().contiguous(),
        "qzeros": pack(zeros.t() - 1, bits),
        "g_idx": (torch.arange(depth) // (depth // groups)).int(),
    }
    return _meant(fields, scales, zeros), stored


def awq(weight: Tensor, group: int) -> Stored:
    """AWQ of the version gemm: 4 bits with zero points, packed along the outputs."""
    fields, scales, zeros = _integers(weight, 4, group, symmetric=False)
    stored = {
        "qweight": _awq_words(fields.t()),
        "scales": scales.t().contiguous(),
        "qzeros": _awq_words(zeros.t()),
    }
    return _meant(fields, scales, zeros), stored


def floats(weight: Tensor, block: tuple[int, int], scale_name: str) -> Stored:
    """e4m3 with one scale per ``block`` of rows and inputs, the last of which may be cut."""
    return _bytes(weight, block, scale_name, _E4M3_MOST, torch.float8_e4m3fn)


def integers(weight: Tensor, block: tuple[int, int], scale_name: str) -> Stored:
    """int8 with one scale per ``block``."""
    return _bytes(weight, block, scale_name, 127.0, torch.int8)


def mxfp4(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As gpt-oss stores experts [E, K, N]: what they mean, blocks [E, N, K / 32, 16], and scales.

    Scales are uint8 [E, N, K / 32], exponents of two plus 127.
    """
    by_block = weights.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (by_block.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2).clamp(-127, 127)
    scaled = by_block / 2.0 ** exponents.unsqueeze(-1)
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    meant = _E2M1[codes] * scaled.sign() * 2.0 ** exponents.unsqueeze(-1)
    codes = codes + 8 * (scaled < 0)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    plain = meant.flatten(2).transpose(1, 2).contiguous()
    return plain, pairs.to(torch.uint8), (exponents + 127).to(torch.uint8)


def nvfp4(weight: Tensor, group: int) -> Stored:
    """NVFP4 as ModelOpt writes it: scales of e4m3 by ``group``, times one for the matrix."""
    by_group = weight.unflatten(1, (-1, group))
    second = weight.abs().max() / (_E4M3_MOST * _E2M1[-1])
    scales = (by_group.abs().amax(-1) / _E2M1[-1] / second).to(torch.float8_e4m3fn)
    whole = (scales.float() * second).unsqueeze(-1)
    scaled = by_group / whole
    codes = (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1)
    meant = _E2M1[codes] * scaled.sign() * whole
    codes = (codes + 8 * (scaled < 0)).flatten(1)
    stored = {
        "weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": second,
        "input_scale": torch.tensor(0.7),
    }
    return meant.flatten(1), stored


def pack(fields: Tensor, bits: int) -> Tensor:
    """Unsigned numbers [..., K] as words int32 [..., K * bits / 32], the first number lowest."""
    places = torch.arange(0, 32, bits)
    words = (fields.unflatten(-1, (-1, 32 // bits)) << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _integers(
    weight: Tensor, bits: int, group: int, *, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned fields [N, K], scales [N, groups] and zero points; K must have whole groups."""
    by_group = weight.unflatten(1, (1, -1) if group == CHANNEL else (-1, group))
    most = 2**bits - 1
    low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
    if symmetric:
        scales = (by_group.abs().amax(-1) / (most // 2)).bfloat16().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        scales = ((high - low) / most).bfloat16().float()
        zeros = (-low / scales).round().clamp(0, most)
    fields = (by_group / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return fields.clamp(0, most).flatten(1).long(), scales, zeros.long()


def _meant(fields: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    by_group = fields.unflatten(1, (scales.shape[1], -1)) - zeros.unsqueeze(-1)
    return (by_group * scales.unsqueeze(-1)).flatten(1)


def _awq_words(numbers: Tensor) -> Tensor:
    """[K, N] of 4 bits as words [K, N / 8]."""
    return pack(numbers.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1), 4)


def _bytes(
    weight: Tensor, block: tuple[int, int], scale_name: str, most: float, dtype: torch.dtype
) -> Stored:
    columns, depth = weight.shape
    rows, inputs = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    scales = torch.empty(-(-columns // rows), -(-depth // inputs))
    for row in range(scales.shape[0]):
        for at in range(scales.shape[1]):
            part = weight[row * rows : (row + 1) * rows, at * inputs : (at + 1) * inputs]
            scales[row, at] = part.abs().max() / most
    spread = scales.repeat_interleave(rows, 0)[:columns].repeat_interleave(inputs, 1)[:, :depth]
    scaled = weight / spread
    numbers = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    return numbers.float() * spread, {"weight": numbers, scale_name: scales}
