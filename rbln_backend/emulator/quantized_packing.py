"""The kernels' layout of weights of 4 and 8 bits: packing checkpoints' words, and the values.

A weight [N, K] is words int32 [ceil(N/16), K * bits / 32, 16], scales [ceil(N/16), groups, 16] and,
if it has zero points, these as uint8 of the same shape: panels of 16
output columns as ``packing`` has them. A word holds 32 / bits neighbours along K, the first in its
lowest bits, which is how most formats pack or store them: packing moves words and changes none.
Those of ``e4m3`` alone are taken apart: its panels are [K / 2, 16, 2] of bytes. What a field stands
for:

* ``int4``, ``int8``: its number less the zero point, or less 2**(bits - 1) where there is none;
* ``e4m3``: the float of 8 bits that torch calls ``float8_e4m3fn``, whose NaN is read as 480;
* ``e2m1``: a float of 4 bits, sign, two bits of exponent and one of mantissa, as the Open Compute
  Project's MX specification has it. Its scales are uint8, for 2**(scale - 127);
* ``blocks8``: its number, of 8 bits with a sign. Groups are of 16 or 32.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rbln_backend.emulator.packing import PANEL, pack_consuming

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
    factors = _powers(scales) if written == "e2m1" else scales.float()
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


def _powers(exponents: Tensor) -> Tensor:
    return exponents.view(torch.float8_e8m0fnu).float()
