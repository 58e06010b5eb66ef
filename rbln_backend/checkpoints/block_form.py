"""Stored form of weights in llama.cpp's blocks; pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """Integers in groups along the input, each with a scale and perhaps a minimum."""

    bits: Literal[4, 8]
    group_size: Literal[16, 32] = 32
    has_minima: bool = False
    scales: Literal["float16", "float32"] = "float16"
    """Of minima, too."""

    @property
    def format(self) -> str:
        """The format's name in ``emulator.quantized_packing``."""
        return f"blocks{self.bits}"

    @property
    def middle(self) -> int:
        """Offset of its numbers: those of 4 bits have no sign."""
        return 8 if self.bits == 4 and not self.has_minima else 0

    def joined(self, other: BlockForm) -> BlockForm:
        """The narrowest form that has all numbers of both."""
        is_equal = self.bits == other.bits and self.has_minima == other.has_minima
        return BlockForm(
            # Numbers with a minimum of 4 bits go from 0, and those without from -8.
            bits=self.bits if is_equal else 8,
            group_size=min(self.group_size, other.group_size),
            has_minima=self.has_minima or other.has_minima,
            scales=max(self.scales, other.scales),
        )

    def num_bytes(self, elements: int) -> int:
        """Return the bytes of this number of weights."""
        each = 4 if self.scales == "float32" else 2
        groups = elements // self.group_size * (2 if self.has_minima else 1)
        return elements * self.bits // 8 + groups * each

    def __str__(self) -> str:
        minima = " with minima" if self.has_minima else ""
        return f"W{self.bits}A16 GGUF blocks of {self.group_size}{minima}"
