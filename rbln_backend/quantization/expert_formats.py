"""Stored formats of one expert's matrix [N, K], and their packing.

vLLM's loader stacks the tensors of all experts, gate and up projections in one, behind "w13_" and
"w2_".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rbln_backend.devices.emulated.packing import (
    pack_scales,
    pack_transposed_words,
    pack_words,
    unpack_numbers,
)
from rbln_backend.quantization.awq_order import words_along_inputs, zero_points
from rbln_backend.quantization.byte_linear import ByteWeights
from rbln_backend.quantization.weights import CHANNEL, Weights

Tensors = dict[str, Tensor]


class Packed(NamedTuple):
    """A matrix as the kernels read it: see ``devices.emulated.packing``."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None


@dataclass(frozen=True)
class ExpertFormat(ABC):
    """One way to store matrices."""

    quantized: Weights
    is_transposed: ClassVar[bool] = False
    """True if tensors have inputs before outputs."""

    @property
    def scope(self) -> str:
        """The scope of a scale, by the name that vLLM's loader uses."""
        return "channel" if self.quantized.group_size == CHANNEL else "group"

    def scope_of(self, suffix: str) -> str:
        """Return the scope of the stored tensor ``suffix``: ``scope``, of all by default."""
        del suffix
        return self.scope

    @property
    def unit(self) -> int:
        """Number that divides both sizes of a rank's matrix."""
        group = self.quantized.group_size
        return self.fields if group == CHANNEL else group

    @property
    def fields(self) -> int:
        """Weights in a word."""
        return 32 // self.quantized.bits

    def groups(self, depth: int) -> int:
        """Scales of a column."""
        group = self.quantized.group_size
        return 1 if group == CHANNEL else depth // group

    @abstractmethod
    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        """Return empty stored tensors by suffix, for ``parts`` matrices [columns, depth] in all."""

    @abstractmethod
    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        """Return one matrix [N, K] in the kernels' layout; may reuse the memory of ``stored``."""


class PackedRows(ExpertFormat):
    """compressed-tensors pack-quantized: words [N, K / fields], scales [N, groups]."""

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        """As ``ExpertFormat``: tensors of a [columns, depth] weight."""
        del parts
        groups = self.groups(depth)
        made = {
            "weight_packed": torch.empty(columns, depth // self.fields, dtype=torch.int32),
            "weight_scale": torch.empty(columns, groups, dtype=dtype),
            "weight_shape": torch.empty(2, dtype=torch.int32),
        }
        if not self.quantized.symmetric:
            zeros = torch.empty(columns // self.fields, groups, dtype=torch.int32)
            made["weight_zero_point"] = zeros
        return made

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        """As ``ExpertFormat``: parts of one [N, K] matrix."""
        words, scales = pack_words(stored["weight_packed"]), pack_scales(stored["weight_scale"])
        if self.quantized.symmetric:
            return Packed(words, scales)
        by_group = stored["weight_zero_point"].t().contiguous()
        zeros = unpack_numbers(by_group, self.quantized.bits).to(torch.uint8)
        return Packed(words, scales, pack_transposed_words(zeros))


class GptqColumns(ExpertFormat):
    """GPTQ: words [K / fields, N], scales [groups, N]; zero points and order say nothing."""

    is_transposed = True

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        """As ``ExpertFormat``: tensors of a [columns, depth] weight."""
        del parts
        groups = self.groups(depth)
        return {
            "qweight": torch.empty(depth // self.fields, columns, dtype=torch.int32),
            "scales": torch.empty(groups, columns, dtype=dtype),
            "qzeros": torch.empty(groups, columns // self.fields, dtype=torch.int32),
            "g_idx": torch.empty(depth, dtype=torch.int32),
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        """As ``ExpertFormat``: parts of one [N, K] matrix."""
        words, scales = stored["qweight"], stored["scales"]
        return Packed(pack_transposed_words(words), pack_transposed_words(scales))


class AwqColumns(ExpertFormat):
    """AWQ: words [K, N / 8] in its own order, scales [groups, N], zero points [groups, N / 8]."""

    is_transposed = True

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        """As ``ExpertFormat``: tensors of a [columns, depth] weight."""
        del parts
        groups = self.groups(depth)
        return {
            "qweight": torch.empty(depth, columns // 8, dtype=torch.int32),
            "scales": torch.empty(groups, columns, dtype=dtype),
            "qzeros": torch.empty(groups, columns // 8, dtype=torch.int32),
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        """As ``ExpertFormat``: parts of one [N, K] matrix."""
        words = pack_transposed_words(words_along_inputs(stored["qweight"]))
        zeros = pack_transposed_words(zero_points(stored["qzeros"]))
        return Packed(words, pack_transposed_words(stored["scales"]), zeros)


@dataclass(frozen=True)
class ByteRows(ExpertFormat):
    """FP8, or integers of 8 bits, a byte each."""

    stored: ByteWeights

    @classmethod
    def of(cls, stored: ByteWeights) -> ByteRows:
        """Rows of what a checkpoint has."""
        stored = stored.switched()
        stored.tell()
        return cls(stored.weights(stored.block[1]), stored)

    @property
    def scope(self) -> str:
        """As ``ExpertFormat``."""
        return self.stored.scope

    @property
    def unit(self) -> int:
        """As ``ExpertFormat``: whole blocks."""
        return lcm(*self.stored.block) if self.stored.scope == "block" else self.fields

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        """As ``ExpertFormat``: tensors of a [columns, depth] weight."""
        del dtype
        rows, inputs = self.stored.block
        scales: dict[str, tuple[int, ...]] = {
            "tensor": (parts,) if parts > 1 else (),
            "channel": (columns, 1),
            "block": (columns // rows, depth // max(inputs, 1)),
        }
        return {
            "weight": torch.empty(columns, depth, dtype=self.stored.dtype),
            # The default dtype is the model's while it is made.
            self.stored.scale_name: torch.empty(scales[self.stored.scope], dtype=torch.float32),
            **{name: torch.empty(()) for name in self.stored.dropped},
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        """As ``ExpertFormat``: parts of one [N, K] matrix."""
        weight, scales = stored["weight"], stored[self.stored.scale_name]
        columns, depth = weight.shape
        parts = scales.numel() if self.stored.scope == "tensor" else 1
        packed = self.stored.pack_scales(scales, [columns // parts] * parts, depth)
        return Packed(self.stored.pack_words(weight), packed)


class Mxfp4Rows(ExpertFormat):
    """gpt-oss as published: two fields a byte [N, K / 2], exponents uint8 [N, K / 32]."""

    @property
    def scope(self) -> str:
        """As ``ExpertFormat``."""
        return "block"

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        """As ``ExpertFormat``: tensors of a [columns, depth] weight."""
        del parts, dtype
        return {
            "weight": torch.empty(columns, depth // 2, dtype=torch.uint8),
            "weight_scale": torch.empty(columns, self.groups(depth), dtype=torch.uint8),
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        """As ``ExpertFormat``: parts of one [N, K] matrix."""
        words = pack_words(stored["weight"].view(torch.int32))
        return Packed(words, pack_scales(stored["weight_scale"]))


class Nvfp4Rows(ExpertFormat):
    """NVFP4 of ModelOpt: two e2m1 a byte [N, K / 2], scales e4m3 [N, groups], one more float32.

    The emulated device has no kernel for such scales: twice an e2m1 is an integer, kept in a byte,
    with one float32 scale for a group, of the same value (1.25 bytes a weight in groups of 16).
    """

    _OF_WHOLE: ClassVar = ("weight_scale_2", "input_scale")

    @property
    def scope(self) -> str:
        """As ``ExpertFormat``."""
        return "block"

    def scope_of(self, suffix: str) -> str:
        """As ``ExpertFormat``; the second scales belong to whole matrices."""
        return "tensor" if suffix in self._OF_WHOLE else self.scope

    def tensors(self, columns: int, depth: int, parts: int, dtype: torch.dtype) -> Tensors:
        """As ``ExpertFormat``: tensors of a [columns, depth] weight."""
        del dtype
        whole = (parts,) if parts > 1 else ()
        return {
            "weight": torch.empty(columns, depth // 2, dtype=torch.uint8),
            "weight_scale": torch.empty(columns, self.groups(depth), dtype=torch.float8_e4m3fn),
            **{name: torch.empty(whole, dtype=torch.float32) for name in self._OF_WHOLE},
        }

    def pack(self, stored: Mapping[str, Tensor]) -> Packed:
        """As ``ExpertFormat``: parts of one [N, K] matrix."""
        halves = torch.stack((stored["weight"] & 15, stored["weight"] >> 4), dim=-1)
        twice = _TWICE_E2M1[halves.flatten(-2).long()]
        seconds = stored["weight_scale_2"].reshape(-1, 1) / 2
        rows = stored["weight_scale"].float()
        scales = rows * seconds.repeat_interleave(len(rows) // len(seconds), 0)
        return Packed(pack_words(twice.view(torch.int32)), pack_scales(scales))


_SIZES = (0, 1, 2, 3, 4, 6, 8, 12)
_TWICE_E2M1 = torch.tensor((*_SIZES, *(-size for size in _SIZES)), dtype=torch.int8)
