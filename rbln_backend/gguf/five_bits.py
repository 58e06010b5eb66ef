"""Blocks of five bits (Q5_0, Q5_1), which transformers' reader does not know.

Layout (llama.cpp, ggml-common.h): 32 numbers; their scale and, of Q5_1, their least value in
float16; a word of their fifth bits; 16 bytes with the other four bits, of which a byte's lower half
is a number of the first 16 and its upper half one of the last.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME

Q5_0, Q5_1 = 6, 7
_HALVES = {Q5_0: 1, Q5_1: 2}


def announce() -> None:
    """Register such blocks with transformers' reader; idempotent."""
    for kind, name in ((Q5_0, "Q5_0"), (Q5_1, "Q5_1")):
        GGML_NAME[kind] = name
        GGML_BLOCK[kind] = (32, 2 * _HALVES[kind] + 4 + 16)


def expand_five_bits(packed: Tensor, kind: int) -> Tensor:
    """uint8 [blocks, bytes] as float32 [blocks, 32]."""
    halves = _HALVES[kind]
    header, fifth, low = packed.split([2 * halves, 4, 16], dim=1)
    scales: Tensor = header.contiguous().view(torch.float16).float()
    bits = (fifth.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    fields = torch.cat((low & 15, low >> 4), dim=1) | bits.flatten(1) << 4
    numbers: Tensor = fields.float()
    least = -16.0 * scales if kind == Q5_0 else scales[:, 1:]
    found: Tensor = numbers * scales[:, :1] + least
    return found
