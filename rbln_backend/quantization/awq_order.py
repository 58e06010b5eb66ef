"""AWQ's order of fields: words hold eight outputs of one input, even ones before odd ones."""

from __future__ import annotations

import torch
from torch import Tensor

# The place of each of eight neighbouring outputs in its word, counted from the lowest bits; as
# AutoAWQ's kernels of the version "gemm" read them.
_PLACES = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7), dtype=torch.int32) * 4


def words_along_inputs(words: Tensor) -> Tensor:
    """Words int32 [K, N / 8] as [K / 8, N], each of eight neighbouring inputs, first lowest."""
    found = words.new_zeros(words.shape[0] // 8, words.shape[1] * 8)
    for place in range(8):
        found |= _numbers(words[place::8]) << (4 * place)
    return found


def zero_points(words: Tensor) -> Tensor:
    """Words int32 [groups, N / 8] as uint8 [groups, N]."""
    return _numbers(words).to(torch.uint8)


def _numbers(words: Tensor) -> Tensor:
    return ((words.unsqueeze(-1) >> _PLACES) & 15).flatten(-2)
