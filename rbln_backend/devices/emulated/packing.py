"""The kernels' weight layout, stated in PyTorch: which weights have one, packing and its inverse.

A [N, K] weight becomes panels of 16 output columns, zero-filled at the edges: float32 and float16
as [N/16, K, 16], bfloat16 as [N/16, K/2, 16, 2], whose neighbours along K share a 32-bit word.

A quantised weight of 4 or 8 bits is words int32 [ceil(N/16), K * bits / 32, 16], scales
[ceil(N/16), groups, 16] and, if it has zero points, these as uint8 of the same shape, in the same
panels. A word holds 32 / bits neighbours along K, the first in its lowest bits, which is how most
formats pack or store them: packing moves words and changes none. Those of ``e4m3`` alone are taken
apart: its panels are [K / 2, 16, 2] of bytes. What a field stands for:

* ``int4``, ``int8``: its number less the zero point, or less 2**(bits - 1) where there is none;
* ``e4m3``: the float of 8 bits that torch calls ``float8_e4m3fn``, whose NaN is read as 480;
* ``e2m1``: a float of 4 bits, sign, two bits of exponent and one of mantissa, as the Open Compute
  Project's MX specification has it. Its scales are uint8, for 2**(scale - 127);
* ``blocks8``: its number, of 8 bits with a sign. Groups are of 16 or 32.
"""

from __future__ import annotations

import math
from typing import Literal

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


Format = Literal["int4", "int8", "e4m3", "e2m1", "blocks8"]
BITS: dict[str, int] = {"int4": 4, "int8": 8, "e4m3": 8, "e2m1": 4, "blocks8": 8}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack_words(words: Tensor) -> Tensor:
    """Words int32 [N, K * bits / 32] as panels; in their own memory where they fit it.

    ``words`` must not be read again.
    """
    # The packer moves words of 32 bits, whatever they mean.
    return pack_consuming(words.view(torch.float32)).view(torch.int32)


def pack_bytes(weight: Tensor) -> Tensor:
    """``weight`` float8_e4m3fn [N, K] as words of panels; in its own memory where they fit it.

    It must not be read again. K is a multiple of 4.
    """
    # The packer moves pairs of bytes, whatever they mean.
    pairs = pack_consuming(weight.view(torch.float16))
    return pairs.view(torch.int32).view(len(pairs), -1, PANEL)


def pack_transposed_words(words: Tensor) -> Tensor:
    """Words int32 [K * bits / 32, N], or scales, as panels; a copy."""
    depth, columns = words.shape
    padded = torch.nn.functional.pad(words, (0, -columns % PANEL))
    return padded.view(depth, -1, PANEL).transpose(0, 1).contiguous()


def pack_scales(scales: Tensor) -> Tensor:
    """Scales or zero points [N, groups] as panels; a copy."""
    return pack_transposed_words(scales.t().contiguous())


def unpack_numbers(words: Tensor, bits: int) -> Tensor:
    """Words int32 [..., W] to the unsigned numbers int32 [..., W * 32 / bits] in them."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def unpack_fields(words: Tensor, bits: int) -> Tensor:
    """Words int32 [..., W] of symmetric integers to their values, int8 [..., W * 32 / bits]."""
    return (unpack_numbers(words, bits) - (1 << (bits - 1))).to(torch.int8)


def dequantize(
    words: Tensor, scales: Tensor, zeros: Tensor | None, out_features: int, written: str
) -> Tensor:
    """The float32 weight [out_features, K] behind the packed parts, in format ``written``."""
    panels, groups = scales.shape[:2]
    if written == "e4m3":
        pairs = words.view(torch.uint8).view(panels, -1, PANEL, 2)
        numbers = pairs.transpose(1, 2).flatten(2)
    else:
        numbers = unpack_numbers(words.transpose(1, 2).contiguous(), BITS[written])
    by_group = _values(numbers, written).view(panels, PANEL, groups, -1)
    if zeros is not None:
        symmetric = 1 << (BITS[written] - 1)
        by_group = by_group + (symmetric - zeros.float()).transpose(1, 2).unsqueeze(-1)
    is_power = written == "e2m1"
    factors = (scales.view(torch.float8_e8m0fnu) if is_power else scales).float()
    scaled = by_group * factors.transpose(1, 2).unsqueeze(-1)
    return scaled.view(panels * PANEL, -1)[:out_features]


def _values(numbers: Tensor, written: str) -> Tensor:
    """Return float32 values of the fields ``numbers`` [...], e4m3 as uint8, without zero points."""
    if written == "blocks8":
        return numbers.to(torch.uint8).view(torch.int8).float()
    if written == "e4m3":
        return numbers.view(torch.float8_e4m3fn).float()
    if written == "e2m1":
        return torch.tensor((*_E2M1, *(-value for value in _E2M1)))[numbers]
    return (numbers - (1 << (BITS[written] - 1))).float()
