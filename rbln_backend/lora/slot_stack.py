"""The adapters' weights of one linear layer, slot by slot, in the kernels' layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_backend.emulator.packing import pack_reference, packed_shape


@dataclass(frozen=True, slots=True)
class LayerImage:
    """One adapter's weights of one layer as they lie in a slot."""

    a: Tensor
    b: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class SlotStack:
    """S slots for a layer of one or several output slices (q, k and v of qkv).

    ``a`` stacks S packed matrices of [slices * rank, inputs]; ``b`` has one stack per slice, of
    packed [outputs, rank]. An adapter of a lower rank leaves the rest zero.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    rank: int
    inputs: int
    outputs: tuple[int, ...]

    @classmethod
    def allocate(
        cls, *, slots: int, rank: int, inputs: int, outputs: Sequence[int], dtype: torch.dtype
    ) -> SlotStack:
        """Empty slots for adapters of up to ``rank``."""
        a = torch.zeros(slots, *packed_shape(dtype, len(outputs) * rank, inputs), dtype=dtype)
        b = [torch.zeros(slots, *packed_shape(dtype, size, rank), dtype=dtype) for size in outputs]
        return cls(a, tuple(b), rank, inputs, tuple(outputs))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that graphs read, by name: shapes [slots, ...packed matrix]."""
        return {"a": self.a} | {f"b{index}": stack for index, stack in enumerate(self.b)}

    def image(self, a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> LayerImage:
        """Pack an adapter: per slice [r, inputs] and [outputs, r], or None where it has none.

        Calls no kernel, so that another thread may do it while graphs run.
        """
        down = self.a.new_zeros(len(self.outputs) * self.rank, self.inputs)
        up = [self.a.new_zeros(size, self.rank) for size in self.outputs]
        for index, (lower, upper) in enumerate(zip(a, b, strict=True)):
            if lower is None or upper is None:
                continue
            first = index * self.rank
            down[first : first + lower.shape[0]] = lower
            up[index][:, : upper.shape[1]] = upper
        return LayerImage(pack_reference(down), tuple(pack_reference(matrix) for matrix in up))

    def write(self, slot: int, image: LayerImage | None) -> None:
        """Put an adapter into ``slot``; None: it does not touch this layer."""
        if image is None:
            self.a[slot].zero_()
            return
        self.a[slot].copy_(image.a)
        for stack, matrix in zip(self.b, image.b, strict=True):
            stack[slot].copy_(matrix)
