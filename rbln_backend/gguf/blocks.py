"""llama.cpp's blocks as integers, scales and minima: a weight is scale * integer + minimum.

Layouts are those of llama.cpp's ggml-common.h and ggml-quants.c. Nothing is rounded: the scales and
minima of the K types, products of a half and a small integer, are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_backend.checkpoints.block_form import BlockForm

Parts = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of llama.cpp's types, as it is kept."""

    form: BlockForm
    split: Callable[[Tensor], Parts]
    """uint8 [blocks, bytes] to int8 [blocks, elements], scales [blocks, groups] and minima."""


def _halves(packed: Tensor) -> Tensor:
    found: Tensor = packed.contiguous().view(torch.float16)
    return found


def _nibbles(low: Tensor) -> Tensor:
    """The lower halves of all bytes, then the upper."""
    return torch.cat((low & 15, low >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """uint8 [..., bytes] to bits [..., bytes * 8], the lowest first."""
    return ((packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _q4_0(packed: Tensor) -> Parts:
    return _nibbles(packed[:, 2:]).to(torch.int8), _halves(packed[:, :2]), None


def _q4_1(packed: Tensor) -> Parts:
    scales = _halves(packed[:, :4])
    return _nibbles(packed[:, 4:]).to(torch.int8), scales[:, :1], scales[:, 1:]


def _q5_0(packed: Tensor) -> Parts:
    numbers = _nibbles(packed[:, 6:]) | _bits(packed[:, 2:6]) << 4
    return numbers.to(torch.int8) - 16, _halves(packed[:, :2]), None


def _q5_1(packed: Tensor) -> Parts:
    numbers = _nibbles(packed[:, 8:]) | _bits(packed[:, 4:8]) << 4
    scales = _halves(packed[:, :4])
    return numbers.to(torch.int8), scales[:, :1], scales[:, 1:]


def _q8_0(packed: Tensor) -> Parts:
    return packed[:, 2:].contiguous().view(torch.int8), _halves(packed[:, :2]), None


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and minima of a K type, float32, of its first 16 bytes."""
    both = _halves(packed[:, :4]).float()
    low, mixed, high = packed[:, 4:8], packed[:, 8:12], packed[:, 12:16]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=1)
    minima = torch.cat((mixed & 63, high >> 4 | mixed >> 6 << 4), dim=1)
    return both[:, :1] * scales.float(), -(both[:, 1:] * minima.float())


def _q4_k(packed: Tensor) -> Parts:
    numbers = _nibbles(packed[:, 16:].unflatten(1, (4, 32))).flatten(1)
    return numbers.to(torch.int8), *_k_scales(packed)


def _q5_k(packed: Tensor) -> Parts:
    # Each byte of fifth bits has one for each of the eight groups.
    fifth = _bits(packed[:, 16:48].unsqueeze(-1)).transpose(1, 2).flatten(1)
    numbers = _nibbles(packed[:, 48:].unflatten(1, (4, 32))).flatten(1) | fifth << 4
    return numbers.to(torch.int8), *_k_scales(packed)


def _q6_k(packed: Tensor) -> Parts:
    low = _nibbles(packed[:, :128].unflatten(1, (2, 64)))
    pairs = packed[:, 128:192].unflatten(1, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).unsqueeze(-1)
    high = ((pairs >> shifts) & 3).flatten(2)
    small = packed[:, 192:208].contiguous().view(torch.int8)
    scales = _halves(packed[:, 208:]).float() * small.float()
    return (low | high << 4).flatten(1).to(torch.int8) - 32, scales, None


TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(BlockForm(bits=4), _q4_0),
    "Q4_1": BlockType(BlockForm(bits=4, has_minima=True), _q4_1),
    "Q5_0": BlockType(BlockForm(bits=8), _q5_0),
    "Q5_1": BlockType(BlockForm(bits=8, has_minima=True), _q5_1),
    "Q8_0": BlockType(BlockForm(bits=8), _q8_0),
    "Q4_K": BlockType(BlockForm(bits=4, has_minima=True, scales="float32"), _q4_k),
    "Q5_K": BlockType(BlockForm(bits=8, has_minima=True, scales="float32"), _q5_k),
    "Q6_K": BlockType(BlockForm(bits=8, group_size=16, scales="float32"), _q6_k),
}
"""By name; blocks of the others are expanded."""


def as_form(parts: Parts, have: BlockForm, wanted: BlockForm) -> Parts:
    """The same numbers in a form that holds all of ``have``'s: see ``BlockForm.joined``."""
    numbers, scales, minima = parts
    repeats = have.group_size // wanted.group_size
    dtype = getattr(torch, wanted.scales)
    if have.middle and (wanted.has_minima or wanted.bits == 8):
        numbers = numbers - have.middle
    if wanted.has_minima and minima is None:
        minima = torch.zeros_like(scales)
    scales = scales.to(dtype).repeat_interleave(repeats, dim=-1)
    if minima is not None:
        minima = minima.to(dtype).repeat_interleave(repeats, dim=-1)
    return numbers, scales, minima
