"""``custom_moe_glu_mxfp4``: experts of gpt-oss over fields of four bits.

Blocks uint8 [E, N, K / 2] hold two e2m1 numbers each, the first in the lower half; scales uint8
[E, N, K / 32] are exponents of two, with a bias of 127; biases [E, N].
"""

from __future__ import annotations

import torch
from rebel.ops.library import CUSTOM, define, describe
from rebel.rules import require
from rebel.settings import SETTINGS
from torch import Tensor
from torch.nn import functional

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_SIZES, *(-size for size in _SIZES)])
_ARGUMENTS = ", ".join(
    (
        "Tensor hidden_states",
        *(
            f"Tensor {part}_proj_{kind}"
            for part in ("gate", "up", "down")
            for kind in ("blocks", "scales", "bias")
        ),
        "Tensor masked_routing_weight, Tensor alpha, Tensor limit, Tensor? expert_map",
    )
)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks [N, K / 2] and scales [N, K / 32] to float32 [N, K]."""
    return e2m1_numbers(blocks) * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def e2m1_numbers(packed: Tensor) -> Tensor:
    """Packed uint8 [..., K / 2] to float32 [..., K].

    With ``nibbles`` broken the first number of a byte is in its upper half.
    """
    halves = [packed & 0xF, packed >> 4]
    if "nibbles" in SETTINGS.broken:
        halves.reverse()
    return _E2M1[torch.stack(halves, dim=-1).flatten(-2).long()]


def moe_glu_mxfp4(x: Tensor, *rest: Tensor | None) -> Tensor:
    """x [T, H]; routing [E of all ranks, T or more]; SwiGLU with ``alpha`` and ``limit``."""
    *parts, routing, alpha, limit, expert_map = rest
    gate, up, down = parts[:3], parts[3:6], parts[6:]
    total = torch.zeros(x.shape, dtype=torch.float32)
    numbers = range(routing.shape[0]) if expert_map is None else expert_map.tolist()
    for everywhere, local in enumerate(numbers):
        if not 0 <= local < gate[0].shape[0]:  # lives on another rank
            continue
        left = _product(x.float(), gate, local).clamp(max=float(limit))
        right = _product(x.float(), up, local).clamp(-float(limit), float(limit))
        inner = left * torch.sigmoid(left * float(alpha)) * (right + 1)
        share = routing[everywhere, : x.shape[0], None].float()
        total += _product(inner, down, local) * share
    return total.to(x.dtype)


def _product(x: Tensor, stack: list[Tensor], number: int) -> Tensor:
    blocks, scales, bias = (part[number] for part in stack)
    return functional.linear(x, from_mxfp4(blocks, scales), bias.float())


def _fake(x: Tensor, *rest: Tensor | None) -> Tensor:
    *parts, routing, alpha, limit, _ = rest
    stored = {part.dtype for place, part in enumerate(parts) if place % 3 < 2}
    require("schema", stored == {torch.uint8}, f"blocks and scales are {stored}, not uint8")
    for number in (alpha, limit):
        kept = number.dim() == 0 and number.dtype == torch.float32
        require("schema", kept, f"alpha or limit is {describe(number)}, not float32[]")
    enough = routing.dim() == 2 and routing.shape[0] >= parts[0].shape[0]
    require("schema", enough, f"masked_routing_weight is {describe(routing)}")
    return torch.empty_like(x)


define(CUSTOM, "custom_moe_glu_mxfp4", _ARGUMENTS, moe_glu_mxfp4, _fake)
